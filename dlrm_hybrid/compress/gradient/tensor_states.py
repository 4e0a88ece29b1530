"""What a sparsifier remembers of its tensors.

All that a resumed run needs lies in arrays; tensors over the same memory go to the checkpoint. The
arrays are those of all tensors, for a step touches every one of them.

Tensors side by side that share a threshold are a unit; its life is kept at the first of them.

Shapes: T tensors of N elements in all, E = T + 1 places between which they lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.lifespan import LifeSpan


@final
class TensorStates:
    """Residuals, thresholds and their lives, and the ledgers of drains.

    Args:
        specs: of the tensors.
        lifespan: of the thresholds.
        units: the places of the tensors that share a threshold.
        keeps: elements of each unit that should leave at the end of a warm-up.
        memories: of the threshold rule, for each tensor; that of the first of a unit is used.

    Attributes:
        units: as given.
        unit_counts: elements of each unit.
        keeps: elements of each unit that should leave now.
        memories: as given.
        counts: elements of each tensor.
        counts_T: the same, int64.
        firsts_E: int64, where each residual begins, and the end of the last.
        residual_N: float32, of all.
        residuals: a view of it for each tensor.
        unit_residuals: a view of it for each unit.
        taus_T: float32, the thresholds; NaN before the first.
        drains_T: int64, how often each residual was drained.
    """

    def __init__(
        self,
        specs: Sequence[Spec],
        lifespan: LifeSpan,
        *,
        units: Sequence[range],
        keeps: Sequence[int],
        memories: Sequence[Mapping[str, Tensor]],
    ) -> None:
        self.specs = specs
        self.units = units
        self.keeps = keeps
        self.memories = memories
        self.counts = [spec.count for spec in specs]
        self.counts_T = np.array(self.counts, np.int64)
        self.firsts_E = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.counts_T)])
        self.residual_N = np.zeros(self.firsts_E[-1], np.float32)
        self.residuals = np.split(self.residual_N, self.firsts_E[1:-1])
        bounds = [(self.firsts_E[unit.start], self.firsts_E[unit.stop]) for unit in units]
        self.unit_residuals = [self.residual_N[first:last] for first, last in bounds]
        self.unit_counts = [residual_U.size for residual_U in self.unit_residuals]
        self._lifespan = lifespan
        self._offsets = [lifespan.offset(number, len(units)) for number in range(len(units))]
        # Where everything leaves there is nothing to find.
        self.taus_T = np.zeros(len(specs), np.float32)
        for unit, is_whole in zip(units, self.whole, strict=True):
            self.taus_T[unit.start : unit.stop] = 0 if is_whole else np.nan
        self.drains_T = np.zeros(len(specs), np.int64)
        self._discarded_T2 = np.zeros((len(specs), 2))  # sum, then the L2 norms of all drains
        self._lives_T2 = np.zeros((len(specs), 2), np.int64)  # age in steps, elements sent
        self._start_report()

    @property
    def whole(self) -> list[bool]:
        """For each unit whether all of it should leave now."""
        return [keep >= count for keep, count in zip(self.keeps, self.unit_counts, strict=True)]

    def over(self, step: int) -> list[int]:
        """The units for which a new threshold is due before this step."""
        taus, lives = self.taus_T.tolist(), self._lives_T2.tolist()
        return [
            number
            for number, unit in enumerate(self.units)
            if self.keeps[number] < self.unit_counts[number]
            and (
                math.isnan(taus[unit.start])
                or self._lifespan.ended(
                    step=step + self._offsets[number],
                    age=lives[unit.start][0],
                    sent=lives[unit.start][1],
                    keep=self.keeps[number],
                )
            )
        ]

    def renew(self, number: int, tau: float) -> None:
        """Begin the life of a unit's threshold."""
        unit = self.units[number]
        for place in unit:
            self._account(place)
            self._renewals[place] += 1
        self.taus_T[unit.start : unit.stop] = tau
        self._lives_T2[unit.start] = 0

    def serve(self, counts: Sequence[int], idle: Sequence[int]) -> None:
        """One more step in the lives of all thresholds but those of `idle` tensors.

        `counts` elements left each tensor.
        """
        # One item of a memoryview is read in a third of the time that one of an array takes.
        lives_T2 = self._lives_T2.data
        for unit in self.units:
            served = [counts[place] for place in unit if place not in idle]
            if served:
                lives_T2[unit.start, 0] += 1
                lives_T2[unit.start, 1] += sum(served)

    def discard(self, place: int) -> None:
        """Forget a residual; the ledger takes its sum and its norm, in float64."""
        lost_N = self.residuals[place].astype(np.float64)
        self._discarded_T2[place] += (lost_N.sum(), np.linalg.norm(lost_N))
        self.residuals[place][:] = 0

    def count_step(self, sent: Sequence[int]) -> None:
        """For the report: one more step, in which `sent` elements left."""
        self._steps += 1
        self._sent = [before + now for before, now in zip(self._sent, sent, strict=True)]

    def tensors(self) -> dict[str, Tensor]:
        """Views of everything a checkpoint must hold, by "<tensor>.<what>"."""
        views: dict[str, Tensor] = {}
        for place, spec in enumerate(self.specs):
            own = slice(place, place + 1)
            small = {
                "threshold": self.taus_T[own],
                "life": self._lives_T2[place],
                "drains": self.drains_T[own],
                "discarded": self._discarded_T2[place],
            }
            held = {
                "residual": torch.from_numpy(self.residuals[place]).view(spec.shape),
                **{name: torch.from_numpy(array) for name, array in small.items()},
                **self.memories[place],
            }
            views |= {f"{spec.name}.{name}": view for name, view in held.items()}
        return views

    def report(self) -> dict[str, TensorReport]:
        """Counts since the last report, by tensor."""
        for place in range(len(self.specs)):
            self._account(place)
        taus = self.taus_T.tolist()
        reports = {
            spec.name: TensorReport(
                elements=self._steps * spec.count,
                sent=self._sent[place],
                threshold=None if math.isnan(taus[place]) else taus[place],
                threshold_sum=self._tau_sums[place],
                thresholds=self._thresholds[place],
                renewals=self._renewals[place],
            )
            for place, spec in enumerate(self.specs)
        }
        self._start_report()
        return reports

    def _account(self, place: int) -> None:
        """For the report: add the threshold once for every step since this was last done."""
        steps, self._accounted[place] = self._steps - self._accounted[place], self._steps
        tau = self.taus_T.item(place)
        if not math.isnan(tau):
            self._tau_sums[place] += steps * tau
            self._thresholds[place] += steps

    def _start_report(self) -> None:
        places = len(self.specs)
        self._steps = 0
        self._sent, self._renewals = [0] * places, [0] * places
        self._thresholds, self._accounted = [0] * places, [0] * places
        self._tau_sums = [0.0] * places
