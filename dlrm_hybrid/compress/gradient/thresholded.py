"""Thresholds that live for many steps, and how many elements should reach them.

As in DCT-DP (Gupta et al., KDD 2021, algorithm 1).

Shapes: T tensors of N elements in all, in G groups of adjacent tensors that share a threshold; F =
G + 1 offsets of groups among the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.compress.gradient.compressor import State
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.gradient.residual import Limits, Residual
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder, target_k
from dlrm_hybrid.compress.gradient.selector import Accumulated, Selection, Selector
from dlrm_hybrid.compress.report import SentReport

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.methods.thresholded import Thresholded

NONE_YET = -1.0  # in the place of a threshold


@final
@dataclass(frozen=True, slots=True)
class ThresholdSelector(Selector):
    """Selects every element whose magnitude reaches its group's long-lived threshold, but no zeros.

    A group whose values have all been zero has no threshold yet. A tensor that is flushed is
    sent in full, which does not count for the life of its threshold.

    Attributes:
        settings: say how many should, and when thresholds are renewed.
        rule: finds thresholds.
    """

    settings: Thresholded
    rule: ThresholdFinder

    @override
    def init(self, layout: Layout) -> Thresholds:
        return Thresholds(layout, self.settings, [self.rule.init() for _ in layout.specs])

    @override
    def select(self, x: Accumulated, state: Thresholds, step: int) -> Selection:
        yield from ()
        return x.meeting(self, state, step)

    def choose(self, x: Residual, state: Thresholds, step: int) -> Indices:
        """Select on the CPU."""
        taus_T = self.begin(state, step)
        renewed: dict[int, float] = {}
        for group in state.due(self.settings, step):
            tensors, k = state.groups[group], state.ks[group]
            tau = self.rule.tau(x.of(tensors), k, state.rule_states[tensors.start])
            renewed[group] = tau
            taus_T[tensors.start : tensors.stop] = tau
        for tensor in x.flushed:
            taus_T[tensor] = 0
        indices = x.reaching(taus_T, None if self.settings.sends_ties else state.limits())
        counts = indices.counts.tolist()
        state.end(renewed, counts, x.flushed)
        return indices

    def begin(self, state: Thresholds, step: int) -> Float32s:
        """The thresholds that a step begins with, 0 where there is none; float32 (T)."""
        sparsity = self.settings.sparsity_at(step)
        if sparsity != state.sparsity:
            state.aim(sparsity)
        # In a warm-up a group without a threshold may be sent in full.
        return np.maximum(state.taus_T, np.float32(0))


@final
class Thresholds(State):
    """The state of `ThresholdSelector`: thresholds, their ages, and what their rule remembers.

    All that a resumed run needs lies in arrays of all tensors, for a step touches every one. What
    belongs to a group is kept at the first of its tensors.

    Args:
        layout: of the tensors.
        settings: say how many elements should be sent.
        rule_states: of the threshold rule, for each tensor; that of the first of a group is used.

    Attributes:
        groups: adjacent tensors that share a threshold.
        counts: elements of each group.
        sparsity: aimed at now.
        ks: elements of each group that should be sent now.
        rule_states: as given.
        taus_T: float32, the thresholds; `NONE_YET` before the first.
    """

    def __init__(
        self, layout: Layout, settings: Thresholded, rule_states: Sequence[Mapping[str, Tensor]]
    ) -> None:
        self._specs, tensors = layout.specs, len(layout.specs)
        width = 1 if settings.scope == "tensor" else max(tensors, 1)
        self.groups = [range(first, first + width) for first in range(0, tensors, width)]
        self.counts = [sum(layout.counts[tensor] for tensor in group) for group in self.groups]
        self.aim(1 - settings.density)
        self.rule_states = rule_states
        self.taus_T = np.zeros(len(layout.specs), np.float32)
        for group, k, count in zip(self.groups, self.ks, self.counts, strict=True):
            # Where everything is sent there is nothing to find.
            self.taus_T[group.start : group.stop] = 0 if k >= count else NONE_YET
        starts = [group.start for group in self.groups]
        self._groups_F = np.array([*starts, len(layout.specs)], np.int64)
        self._lives_T2 = np.zeros((len(layout.specs), 2), np.int64)  # age in steps, elements sent
        self._start_report()

    def aim(self, sparsity: float) -> None:
        """Let this fraction of the elements of each group not be sent from now on."""
        self.sparsity = sparsity
        self.ks = [target_k(count, sparsity) for count in self.counts]

    def limits(self) -> Limits:
        """The limits that select at most k elements of each group."""
        return Limits(self._groups_F, np.array(self.ks, np.int64))

    def due(self, settings: Thresholded, step: int) -> list[int]:
        """The groups for which a new threshold must be found before this step.

        Staggered ones come early, spread evenly over a lifespan.
        """
        taus, lives, groups = self.taus_T.tolist(), self._lives_T2.tolist(), len(self.groups)
        due: list[int] = []
        for number, (group, k) in enumerate(zip(self.groups, self.ks, strict=True)):
            if k >= self.counts[number]:
                continue
            age, sent = lives[group.start]
            early = number * settings.lifespan // groups if settings.staggered else 0
            is_new = taus[group.start] < 0
            if is_new or settings.renews(step=step + early, age=age, sent=sent, k=k):
                due.append(number)
        return due

    def end(
        self, renewed: Mapping[int, float], counts: Sequence[int], flushed: Sequence[int]
    ) -> None:
        """Take note of a step: new thresholds by group, and how much of each tensor has left."""
        for group, tau in renewed.items():
            # Nothing but zeros says nothing: a threshold of 0 from there would send all that
            # comes later.
            if tau > 0 or any(counts[tensor] > 0 for tensor in self.groups[group]):
                self._renew(group, tau)
        self._count_step(counts, flushed)

    def _renew(self, number: int, tau: float) -> None:
        group = self.groups[number]
        for tensor in group:
            self._account(tensor)
            self._renewals[tensor] += 1
        self.taus_T[group.start : group.stop] = tau
        self._lives_T2[group.start] = 0

    def _count_step(self, counts: Sequence[int], flushed: Sequence[int]) -> None:
        # One item of a memoryview is read in a third of the time that one of an array takes.
        lives_T2 = self._lives_T2.data
        for group in self.groups:
            served = [counts[tensor] for tensor in group if tensor not in flushed]
            if served:
                lives_T2[group.start, 0] += 1
                lives_T2[group.start, 1] += sum(served)
        self._steps += 1

    @override
    def tensors(self) -> dict[str, Tensor]:
        views: dict[str, Tensor] = {}
        for tensor, spec in enumerate(self._specs):
            state = {
                "threshold": torch.from_numpy(self.taus_T[tensor : tensor + 1]),
                "life": torch.from_numpy(self._lives_T2[tensor]),
                **self.rule_states[tensor],
            }
            views |= {f"{spec.name}.{name}": view for name, view in state.items()}
        return views

    @override
    def report(self, reports: Sequence[SentReport]) -> Sequence[SentReport]:
        for tensor in range(len(self._specs)):
            self._account(tensor)
        columns = zip(reports, self._sums, self._served, self._renewals, strict=True)
        reports = [
            replace(report, threshold_sum=total, thresholds=served, renewals=renewals)
            for report, total, served, renewals in columns
        ]
        self._start_report()
        return reports

    def _account(self, tensor: int) -> None:
        """For the report: add a threshold once for every step since this was last done."""
        steps, self._accounted[tensor] = self._steps - self._accounted[tensor], self._steps
        tau = self.taus_T.item(tensor)
        if tau >= 0:
            self._sums[tensor] += steps * tau
            self._served[tensor] += steps

    def _start_report(self) -> None:
        # Plain numbers: to change one of an array takes ten times as long.
        tensors = len(self._specs)
        self._steps = 0
        self._sums = [0.0] * tensors
        self._accounted, self._served, self._renewals = ([0] * tensors for _ in range(3))
