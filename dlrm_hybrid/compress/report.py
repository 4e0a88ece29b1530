"""How much a compressor has sent, in the form that events and summaries are made of."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import Lock
from typing import final

import numpy as np

from dlrm_hybrid.arrays import Float32s

MAX_WAITING = 64  # tensors whose thresholds are held


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SentReport:
    """What was sent of one tensor, or over one boundary, since the last report.

    Attributes:
        elements: of the tensor, summed over steps or micro-batches.
        sent: of these, how many were sent as numbers.
        threshold_sum: of the thresholds of all steps or micro-batches that had one.
        thresholds: how many those are.
        renewals: how often a threshold that is kept for many steps was found anew.
    """

    elements: int
    sent: int
    threshold_sum: float = 0.0
    thresholds: int = 0
    renewals: int = 0

    @property
    def threshold(self) -> float | None:
        """The mean threshold; None without thresholds."""
        return self.threshold_sum / self.thresholds if self.thresholds else None


@final
@dataclass(slots=True)
class Tally:
    """Sums up the tensors that a codec of activations has sent until they are reported.

    Several threads may add.

    Each tensor's mean threshold is rounded to float32, so that their sum is exact: it is the same
    however steps are gathered into reports.
    """

    elements: int = 0
    sent: int = 0
    threshold_sum: float = 0.0
    thresholds: int = 0
    _waiting: list[Float32s] = field(default_factory=list[Float32s])
    _turn: Lock = field(default_factory=Lock, repr=False)

    def add(self, elements: int, sent: int, thresholds_R: Float32s) -> None:
        """Count one tensor; its thresholds are float32, any number of them, and are kept."""
        with self._turn:
            self.elements += elements
            self.sent += sent
            if thresholds_R.size:
                self._waiting.append(thresholds_R)
            if len(self._waiting) == MAX_WAITING:
                self._sum_means()

    def take(self) -> SentReport | None:
        """The sums, which begin anew; None if nothing was sent."""
        with self._turn:
            self._sum_means()
            report = SentReport(
                elements=self.elements,
                sent=self.sent,
                threshold_sum=self.threshold_sum,
                thresholds=self.thresholds,
            )
            self.elements = self.sent = self.thresholds = 0
            self.threshold_sum = 0.0
        return report if report.elements else None

    def _sum_means(self) -> None:
        # Many at a time cost less than one between steps, out of cold caches.
        for thresholds_R in self._waiting:
            self.threshold_sum += float(np.float32(thresholds_R.mean(dtype=np.float64)))
        self.thresholds += len(self._waiting)
        self._waiting.clear()
