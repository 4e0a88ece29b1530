"""The events of a run: events on record, and events that are only displayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from dlrm_hybrid.checkpoint.commit import Saved
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval, RankMeter
from dlrm_hybrid.train.engine import Show
from dlrm_hybrid.train.progress import Plan, Progress
from dlrm_hybrid.types import ScoredPart

TICK_SECONDS = 0.5  # between events that are only displayed


@final
@dataclass(slots=True, kw_only=True)
class Recorder:
    """Records what happens in a run, and shows it meanwhile.

    Attributes:
        plan: plan of the run.
        schedule: learning rate of the dense parameters.
        meter: meter of the process.
        record: takes the events on record.
        live: takes the events that are only displayed.
    """

    plan: Plan
    schedule: LrSchedule
    meter: RankMeter
    record: Callable[[Event], None]
    live: Callable[[Event], None]
    _next_tick: float = 0.0

    def point(self, progress: Progress) -> Progress:
        """Record a point of the loss curve, the mean over all rows since the last one.

        Returns:
            The progress with new sums; unchanged if there were no rows.
        """
        interval = progress.interval
        if interval.rows == 0:
            return progress
        timed = self.meter.take(self.plan.samples_per_step)
        self._write(
            Kind.PROGRESS,
            progress,
            rows=interval.rows,
            loss=interval.loss_sum / interval.rows,
            accuracy=interval.correct / interval.rows,
            lr=self.schedule.lr(progress.step - 1),
            samples_per_step=self.plan.samples_per_step,
            is_short=self.plan.is_short(progress.step),
            **timed,
            **_sent(interval),
        )
        if interval.compression:
            self._write(Kind.COMPRESSION, progress, of=compression.values_of(interval.compression))
        return replace(progress, interval=Interval())

    def tick(self, progress: Progress) -> None:
        """Show the means since the last point, now and then."""
        interval = progress.interval
        if time.monotonic() < self._next_tick or interval.rows == 0:
            return
        values = {
            "samples": progress.samples,
            "loss": interval.loss_sum / interval.rows,
            "accuracy": interval.correct / interval.rows,
            **_sent(interval),
        }
        self.live(Event(Kind.TICK, progress.step, time.time(), values))
        self._next_tick = time.monotonic() + TICK_SECONDS

    def evaluated(
        self, progress: Progress, part: ScoredPart, scores: BinaryScores, seconds: float
    ) -> None:
        """Record scores of a part of the rows."""
        fields = {} if self.plan.parts == (ScoredPart.TEST,) else {"part": part.value}
        self._write(Kind.EVALUATED, progress, **fields, seconds=seconds, **scores.values)

    def saved(self, saved: Saved, waited_seconds: float) -> None:
        """Record a checkpoint that has become valid, for which training waited so long."""
        values = {
            "path": saved.folder.name,
            "num_bytes": saved.num_bytes,
            "seconds": saved.seconds + waited_seconds,
            "background_seconds": saved.background_seconds,
        }
        self.record(Event(Kind.SAVED, saved.step, time.time(), values))

    def stopping(self, progress: Progress) -> None:
        """Show that a signal ends the run."""
        self.live(Event(Kind.STOPPING, progress.step, time.time(), {}))

    def stopped(self, progress: Progress) -> None:
        """Record where a run has ended early."""
        self._write(Kind.STOPPED, progress)

    def _write(self, kind: Kind, progress: Progress, **values: Any) -> None:
        if progress.batches:
            values["batches"] = progress.batches
        values = {"samples": progress.samples, **values}
        self.record(Event(kind, progress.step, time.time(), values))


def reporting(live: Callable[[Event], None], task: str, unit: str) -> Show:
    """Make a function that reports, now and then, the progress of a long task.

    Args:
        live: called with the events.
        task: name of the task, in a word.
        unit: what is counted, rows or bytes.
    """
    next_tick = 0.0

    def show(done: int, total: int) -> None:
        nonlocal next_tick
        now = time.monotonic()
        if now >= next_tick:
            next_tick = now + TICK_SECONDS
            values = {"task": task, "done": done, "total": total, "unit": unit}
            live(Event(Kind.WORKING, -1, time.time(), values))

    return show


def _sent(interval: Interval) -> dict[str, int | None]:
    """Fields of events for the bytes sent in an interval; None if they are not counted."""
    names = ("sent_bytes", "dense_equivalent_bytes", "sent_rows")
    return {name: getattr(interval, name) if interval.sent_rows else None for name in names}
