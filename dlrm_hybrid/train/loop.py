"""The training loop: batches in, events out, checkpoints on the way.

    for every step:
        meet the other processes
        every `report_every`:     a point of the loss curve
        stop here if a signal asked for it              (SIGTERM: save first)
        every `evaluate_every`:   scores on the test part
        every `checkpoint_every`: a checkpoint
        learn from a batch, refuse a loss that is not finite
    at the end: meet, a point, scores, a checkpoint

One process runs it alone. In a world of processes every worker runs it, in step: what is due
follows from the plan, and `meet` brings together what each worker knows.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.meter import Interval, Stopwatch
from dlrm_hybrid.train.parts import Parts, Plan, Progress, is_due
from dlrm_hybrid.train.signals import obey
from dlrm_hybrid.types import DivergedError, PreemptedError

TICK_SECONDS = 0.5


def train(parts: Parts, plan: Plan, progress: Progress) -> Progress:
    """Train from `progress` to the end of `plan`.

    Raises:
        DivergedError: a loss is not finite.
        PreemptedError: after SIGTERM, with a checkpoint saved.
        InterruptedRunError: after Ctrl-C, with nothing saved.
    """
    run = _Run(parts, plan, progress)
    try:
        run.steps()
    except PreemptedError:
        run.save()
        raise
    return run.progress


class _Run:
    """One call of `train`: the progress so far, and the clock."""

    def __init__(self, parts: Parts, plan: Plan, progress: Progress) -> None:
        self.progress = progress
        self._parts = parts
        self._plan = plan
        self._stopwatch = Stopwatch()
        self._lr = 0.0
        self._spans: Mapping[str, float] = parts.spans()
        self._next_tick = 0.0
        self._saved_step = progress.step if progress.step else -1

    def steps(self) -> None:
        """All steps that are left, with what falls due between them."""
        plan = self._plan
        while True:
            self.progress, severity = self._parts.meet(self.progress)
            step = self.progress.step
            at_end = step >= plan.steps
            if at_end or is_due(step, plan.report_every):
                self.report()
            elif time.monotonic() >= self._next_tick:
                self._tick()
            obey(severity)
            if at_end or is_due(step, plan.evaluate_every):
                self.evaluate()
            if at_end or is_due(step, plan.checkpoint_every):
                self.save()
            if at_end:
                return
            self._step()

    def evaluate(self) -> None:
        """Score the model, once for each step at which it falls due."""
        if self.progress.evaluated_step == self.progress.step:
            return
        self._stopwatch.pause()
        start = time.perf_counter()
        scores = self._parts.evaluate()
        seconds = time.perf_counter() - start
        if scores is not None:
            self._emit(Kind.EVALUATED, seconds=seconds, **asdict(scores))
        self.progress = replace(
            self.progress,
            evaluated_step=self.progress.step,
            test_loss=None if scores is None else scores.log_loss,
        )
        self._stopwatch.resume()

    def report(self) -> None:
        """A point of the loss curve, unless no step was made since the last one."""
        interval = self.progress.interval
        rows, seconds, cpu_seconds = self._stopwatch.take()
        if interval.rows == 0:
            return
        self._emit(
            Kind.PROGRESS,
            rows=interval.rows,
            loss=interval.loss_sum / interval.rows,
            accuracy=interval.correct / interval.rows,
            lr=self._lr,
            samples_per_step=self._plan.samples_per_step,
            timed_rows=rows,
            timed_seconds=seconds,
            timed_cpu_seconds=cpu_seconds,
            seconds_by_span=self._seconds_by_span(),
            **_sent(interval),
        )
        if interval.compression:
            self._emit(Kind.COMPRESSION, of=compression.values_of(interval.compression))
        self.progress = replace(self.progress, interval=Interval())

    def save(self) -> None:
        """A checkpoint of this step, unless it is there."""
        if self._saved_step == self.progress.step:
            return
        self._saved_step = self.progress.step
        self._stopwatch.pause()
        start = time.perf_counter()
        saved = self._parts.save(self.progress)
        seconds = time.perf_counter() - start
        if saved is not None:
            self._emit(
                Kind.SAVED, path=saved.folder.name, num_bytes=saved.num_bytes, seconds=seconds
            )
        self._stopwatch.resume()

    def _step(self) -> None:
        progress = self.progress
        learned, after = self._parts.learn(progress.step, progress.loader)
        self._lr = learned.lr
        if not math.isfinite(learned.loss_sum):
            raise DivergedError(
                f"step {progress.step + 1}: the loss is {learned.loss_sum}; "
                f"optimizer.lr = {learned.lr} may be too high"
            )
        interval = progress.interval
        samples = self._plan.samples_per_step
        self.progress = Progress(
            step=progress.step + 1,
            samples=progress.samples + samples,
            loader=after,
            interval=replace(
                interval,
                rows=interval.rows + learned.rows,
                loss_sum=interval.loss_sum + learned.loss_sum,
                correct=interval.correct + learned.correct,
            ),
            evaluated_step=progress.evaluated_step,
            test_loss=progress.test_loss,
        )
        self._stopwatch.step_done(samples)

    def _seconds_by_span(self) -> dict[str, float]:
        """Since the last call."""
        before, self._spans = self._spans, self._parts.spans()
        return {span: seconds - before[span] for span, seconds in self._spans.items()}

    def _tick(self) -> None:
        interval = self.progress.interval
        if interval.rows == 0:
            return
        values = {
            "samples": self.progress.samples,
            "loss": interval.loss_sum / interval.rows,
            "accuracy": interval.correct / interval.rows,
            **_sent(interval),
        }
        self._parts.live(Event(Kind.TICK, self.progress.step, time.time(), values))
        self._next_tick = time.monotonic() + TICK_SECONDS

    def _emit(self, kind: Kind, **values: Any) -> None:
        values = {"samples": self.progress.samples, **values}
        self._parts.sink.write(Event(kind, self.progress.step, time.time(), values))


def _sent(interval: Interval) -> dict[str, int | None]:
    """What events say of the bytes sent in an interval; None where nobody counts them."""
    counted = interval.sent_rows > 0
    return {
        "sent_bytes": interval.sent_bytes if counted else None,
        "dense_equivalent_bytes": interval.dense_equivalent_bytes if counted else None,
        "sent_rows": interval.sent_rows if counted else None,
    }
