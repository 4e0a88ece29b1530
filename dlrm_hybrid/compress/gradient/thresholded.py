"""Thresholds that live for many steps (DCT-DP; Gupta et al., KDD 2021, algorithm 1).

Shapes: T tensors of N elements in all, in G groups of adjacent tensors that share a threshold; F =
G + 1 offsets of groups among the tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.gradient.accumulated import Accumulated, Limits
from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.gradient.selector import Selection, ThresholdReport
from dlrm_hybrid.compress.gradient.target import Renewal, SparsityTarget
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Thresholded:
    """Every element whose magnitude reaches its group's threshold; zeros never do.

    A group whose values have all been zero has no threshold yet. A tensor that is flushed goes
    whole, and leaves no trace in the life of its threshold.

    Attributes:
        target: how many should.
        rule: finds thresholds.
        renewal: says when.
    """

    target: SparsityTarget
    rule: ThresholdRule
    renewal: Renewal

    @property
    def rounds(self) -> tuple[Op, ...]:
        """None."""
        return ()

    def init(self, layout: Layout) -> Thresholds:
        """No threshold yet, but 0 where everything is sent."""
        return Thresholds(layout, self.target, [self.rule.init() for _ in layout.specs])

    def select(self, x: Accumulated, state: Thresholds, step: int) -> Selection:
        """What reaches the thresholds, after those that are due have been renewed."""
        yield from ()
        return self._select(x, state, step)

    def _select(self, x: Accumulated, state: Thresholds, step: int) -> Indices:
        target = self.target
        if target.warmup_steps and state.sparsity != target.sparsity_at(step):
            state.sparsity = target.sparsity_at(step)
            state.ks = target.ks(state.counts, step)
        # In a warm-up a group may be sent whole that has no threshold yet.
        taus = [0.0 if math.isnan(tau) else tau for tau in state.taus_T.tolist()]
        renewed: dict[int, float] = {}
        for group in state.due(self.renewal, step):
            tensors, k = state.groups[group], state.ks[group]
            tau = self.rule.tau(x.of(tensors), k, state.rule_states[tensors.start])
            renewed[group] = tau
            taus[tensors.start : tensors.stop] = [tau] * len(tensors)
        for tensor in x.flushed:
            taus[tensor] = 0.0
        indices = x.reaching(
            np.array(taus, np.float32), None if target.sends_ties else state.limits()
        )
        counts = indices.counts.tolist()
        for group, tau in renewed.items():
            # Nothing but zeros tells nothing: a threshold of 0 from there would send all that
            # comes later.
            if tau > 0 or any(counts[tensor] > 0 for tensor in state.groups[group]):
                state.renew(group, tau)
        state.count_step(counts, x.flushed)
        return indices


@final
class Thresholds:
    """Thresholds, how long they have lived, and what their rule remembers.

    All that a resumed run needs lies in arrays of all tensors, for a step touches every one. What
    belongs to a group is kept at the first of its tensors.

    Args:
        layout: of the tensors.
        target: how many elements should be sent.
        rule_states: of the threshold rule, for each tensor; that of the first of a group is used.

    Attributes:
        groups: adjacent tensors that share a threshold.
        counts: elements of each group.
        sparsity: aimed at now.
        ks: elements of each group that should be sent now.
        rule_states: as given.
        taus_T: float32, the thresholds; NaN before the first.
    """

    def __init__(
        self, layout: Layout, target: SparsityTarget, rule_states: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._specs = layout.specs
        self.groups = target.groups(len(layout.specs))
        self.counts = [sum(layout.counts[tensor] for tensor in group) for group in self.groups]
        self.sparsity = target.sparsity
        self.ks = target.ks(self.counts, target.warmup_end)
        self.rule_states = rule_states
        self.taus_T = np.zeros(len(layout.specs), np.float32)
        for group, k, count in zip(self.groups, self.ks, self.counts, strict=True):
            # Where everything is sent there is nothing to find.
            self.taus_T[group.start : group.stop] = 0 if k >= count else np.nan
        starts = [group.start for group in self.groups]
        self._groups_F = np.array([*starts, len(layout.specs)], np.int64)
        self._lives_T2 = np.zeros((len(layout.specs), 2), np.int64)  # age in steps, elements sent
        self._start_report()

    def limits(self) -> Limits:
        """At most k elements of each group."""
        return Limits(self._groups_F, np.array(self.ks, np.int64))

    def due(self, renewal: Renewal, step: int) -> list[int]:
        """The groups for which a new threshold must be found before this step."""
        taus, lives = self.taus_T.tolist(), self._lives_T2.tolist()
        return [
            number
            for number, group in enumerate(self.groups)
            if self.ks[number] < self.counts[number]
            and (
                math.isnan(taus[group.start])
                or renewal.is_due(
                    step=step + renewal.lead(number, len(self.groups)),
                    age=lives[group.start][0],
                    sent=lives[group.start][1],
                    k=self.ks[number],
                )
            )
        ]

    def renew(self, number: int, tau: float) -> None:
        """Begin the life of a group's threshold."""
        group = self.groups[number]
        for tensor in group:
            self._account(tensor)
            self._renewals[tensor] += 1
        self.taus_T[group.start : group.stop] = tau
        self._lives_T2[group.start] = 0

    def count_step(self, counts: Sequence[int], flushed: Sequence[int]) -> None:
        """One more step, in which so many elements of each tensor were selected."""
        # One item of a memoryview is read in a third of the time that one of an array takes.
        lives_T2 = self._lives_T2.data
        for group in self.groups:
            served = [counts[tensor] for tensor in group if tensor not in flushed]
            if served:
                lives_T2[group.start, 0] += 1
                lives_T2[group.start, 1] += sum(served)
        self._steps += 1

    def tensors(self) -> dict[str, Tensor]:
        """Views "<tensor>.threshold", "<tensor>.life", and those of the rule."""
        views: dict[str, Tensor] = {}
        for tensor, spec in enumerate(self._specs):
            held = {
                "threshold": torch.from_numpy(self.taus_T[tensor : tensor + 1]),
                "life": torch.from_numpy(self._lives_T2[tensor]),
                **self.rule_states[tensor],
            }
            views |= {f"{spec.name}.{name}": view for name, view in held.items()}
        return views

    def report(self) -> Sequence[ThresholdReport]:
        """By tensor, since the last report."""
        reports: list[ThresholdReport] = []
        for tensor, tau in enumerate(self.taus_T.tolist()):
            self._account(tensor)
            reports.append(
                ThresholdReport(
                    threshold=None if math.isnan(tau) else tau,
                    total=self._totals[tensor],
                    steps=self._served[tensor],
                    renewals=self._renewals[tensor],
                )
            )
        self._start_report()
        return reports

    def _account(self, tensor: int) -> None:
        """For the report: add the threshold once for every step since this was last done."""
        steps, self._accounted[tensor] = self._steps - self._accounted[tensor], self._steps
        tau = self.taus_T.item(tensor)
        if not math.isnan(tau):
            self._totals[tensor] += steps * tau
            self._served[tensor] += steps

    def _start_report(self) -> None:
        tensors = len(self._specs)
        self._steps = 0
        self._renewals, self._served = [0] * tensors, [0] * tensors
        self._accounted = [0] * tensors
        self._totals = [0.0] * tensors
