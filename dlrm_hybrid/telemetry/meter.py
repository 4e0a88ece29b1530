"""Means over the steps between two points of the loss curve, and the time they took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dlrm_hybrid.telemetry.compression import Counts, merged

WARMUP_STEPS = 5


@dataclass(frozen=True, slots=True)
class Interval:
    """Sums since the last point of the loss curve; a checkpoint keeps them for the next point.

    Attributes:
        rows: learned from, as far as this process knows; so are the next two.
        loss_sum: over the rows.
        correct: of the rows.
        sent_bytes: by all ranks, where they are counted; known when workers meet.
        dense_equivalent_bytes: of these.
        sent_rows: learned from while these were sent.
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


@dataclass(slots=True)
class Stopwatch:
    """Wall and CPU time of training steps only: it stands still while evaluating or saving.

    The first steps of an attempt are not counted: caches and allocators settle in them.
    """

    warmup_steps: int = WARMUP_STEPS
    rows: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    wall_clock: Callable[[], float] = time.perf_counter
    cpu_clock: Callable[[], float] = time.process_time
    _wall_start: float | None = None
    _cpu_start: float = 0.0
    _pending_rows: int = 0

    def step_done(self, rows: int) -> None:
        """Count one step; time runs from the end of the last warm-up step."""
        if self.warmup_steps > 0:
            self.warmup_steps -= 1
        elif self._wall_start is not None:
            self._pending_rows += rows
        if self._wall_start is None and self.warmup_steps == 0:
            self.resume()

    def resume(self) -> None:
        """Let time run (again), once the warm-up is over."""
        if self.warmup_steps == 0:
            self._wall_start = self.wall_clock()
            self._cpu_start = self.cpu_clock()

    def pause(self) -> None:
        """Add what has run to the sums and stand still."""
        if self._wall_start is None:
            return
        self.seconds += self.wall_clock() - self._wall_start
        self.cpu_seconds += self.cpu_clock() - self._cpu_start
        self.rows += self._pending_rows
        self._pending_rows = 0
        self._wall_start = None

    def take(self) -> tuple[int, float, float]:
        """Rows, wall seconds and CPU seconds since the last call; time goes on running."""
        running = self._wall_start is not None
        self.pause()
        taken = (self.rows, self.seconds, self.cpu_seconds)
        self.rows, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        if running:
            self.resume()
        return taken
