"""How much of what crosses the boundaries is kept, and from which magnitude on.

Shapes: R thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import numpy as np
from numpy.typing import NDArray

MOST_WAITING = 64  # tensors whose thresholds are held


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReport:
    """What one end of a boundary has sent since the last report.

    Attributes:
        elements: of the tensors, summed over micro-batches.
        kept: of these, how many travelled as numbers.
        threshold_sum: of the tensors' means of the magnitudes from which elements are kept. Each
            mean is rounded to float32, so that the sum is exact: it is the same however steps are
            gathered into reports.
        thresholds: tensors that have thresholds.
    """

    elements: int
    kept: int
    threshold_sum: float
    thresholds: int

    @property
    def threshold(self) -> float | None:
        """Their mean over all tensors; None without thresholds."""
        return self.threshold_sum / self.thresholds if self.thresholds else None


@final
class Tally:
    """Sums up tensors until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def add(
        self, boundary: int, elements: int, kept: int, thresholds_R: NDArray[np.float32]
    ) -> None:
        """Count one tensor; its thresholds are float32, any number of them, and are kept."""
        sums = self._sums.setdefault(boundary, _Sums())
        sums.elements += elements
        sums.kept += kept
        if thresholds_R.size:
            sums.waiting.append(thresholds_R)
        if len(sums.waiting) == MOST_WAITING:
            sums.take_means()

    def take(self) -> dict[int, BoundaryReport]:
        """The sums per boundary; begins anew."""
        sums, self._sums = self._sums, {}
        return {boundary: one.report() for boundary, one in sorted(sums.items())}


@dataclass(slots=True)
class _Sums:
    elements: int = 0
    kept: int = 0
    threshold_sum: float = 0.0
    thresholds: int = 0
    waiting: list[NDArray[np.float32]] = field(default_factory=list[NDArray[np.float32]])

    def take_means(self) -> None:
        """Of what waits: many at a time cost less than one between steps, out of cold caches."""
        for thresholds_R in self.waiting:
            self.threshold_sum += float(np.float32(thresholds_R.mean(dtype=np.float64)))
        self.thresholds += len(self.waiting)
        self.waiting.clear()

    def report(self) -> BoundaryReport:
        self.take_means()
        return BoundaryReport(
            elements=self.elements,
            kept=self.kept,
            threshold_sum=self.threshold_sum,
            thresholds=self.thresholds,
        )
