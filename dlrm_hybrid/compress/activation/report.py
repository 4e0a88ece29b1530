"""How much of what crosses the boundaries is kept, and from which magnitude on.

Shapes: R thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryReport:
    """What one end of a boundary has sent since the last report.

    Attributes:
        elements: of the tensors, summed over micro-batches.
        kept: of these, how many travelled as numbers.
        threshold: mean of the magnitudes from which elements are kept; None without thresholds.
    """

    elements: int
    kept: int
    threshold: float | None


@final
class Tally:
    """Sums up tensors until they are reported."""

    def __init__(self) -> None:
        self._sums: dict[int, _Sums] = {}

    def add(
        self, boundary: int, elements: int, kept: int, thresholds_R: NDArray[np.float32]
    ) -> None:
        """Count one tensor; its thresholds are float32, any number of them."""
        sums = self._sums.setdefault(boundary, _Sums())
        sums.elements += elements
        sums.kept += kept
        sums.threshold += float(thresholds_R.sum(dtype=np.float64))
        sums.thresholds += thresholds_R.size

    def take(self) -> dict[int, BoundaryReport]:
        """The sums per boundary; begins anew."""
        sums, self._sums = self._sums, {}
        return {boundary: one.report() for boundary, one in sorted(sums.items())}


@dataclass(slots=True)
class _Sums:
    elements: int = 0
    kept: int = 0
    threshold: float = 0.0
    thresholds: int = 0

    def report(self) -> BoundaryReport:
        mean = self.threshold / self.thresholds if self.thresholds else None
        return BoundaryReport(elements=self.elements, kept=self.kept, threshold=mean)
