"""Sums over the steps between two points of the loss curve."""

from __future__ import annotations

from dataclasses import dataclass, field

from dlrm_hybrid.telemetry.compression import Counts, merged

WARMUP_STEPS = 5  # of each attempt: caches and allocators settle in them, so they are not timed


@dataclass(frozen=True, slots=True)
class Interval:
    """Sums since the last point of the loss curve; a checkpoint keeps them for the next point.

    Attributes:
        rows: trained on, as far as this process knows; so are the next two.
        loss_sum: over the rows.
        correct: of the rows.
        sent_bytes: by all ranks, where they are counted; known when workers meet.
        dense_equivalent_bytes: of these.
        sent_rows: trained on while these were sent.
        compression: what it let through.
    """

    rows: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    sent_bytes: int = 0
    dense_equivalent_bytes: int = 0
    sent_rows: int = 0
    compression: Counts = field(default_factory=dict[str, dict[str, float]])

    def plus(self, *others: Interval) -> Interval:
        """The sums of several workers, or of intervals that follow each other."""
        several = (self, *others)
        return Interval(
            rows=sum(one.rows for one in several),
            loss_sum=sum(one.loss_sum for one in several),
            correct=sum(one.correct for one in several),
            sent_bytes=sum(one.sent_bytes for one in several),
            dense_equivalent_bytes=sum(one.dense_equivalent_bytes for one in several),
            sent_rows=sum(one.sent_rows for one in several),
            compression=merged(one.compression for one in several),
        )
