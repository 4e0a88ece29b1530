"""The training loop: batches in, events out, checkpoints on the way.

while steps are left:
    stop here if a signal asked for it         (SIGTERM: save first)
    read a batch, learn from it, refuse a loss that is not finite
    every `report_every`:     a point of the loss curve
    every `evaluate_every`:   scores on the test part
    every `checkpoint_every`: a checkpoint
scores on the test part, a checkpoint
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from dlrm_hybrid.data.loader import START, Loader, LoaderState
from dlrm_hybrid.model.schedule import Schedule
from dlrm_hybrid.model.step import Trainer
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.meter import Interval, Stopwatch
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.sinks import Sink
from dlrm_hybrid.train.checkpoint import Saved
from dlrm_hybrid.types import DivergedError, PreemptedError

TICK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; with the tensors, all that resuming needs.

    Attributes:
        step: steps done.
        samples: rows learned from, of all trainers.
        loader: where the next batch begins.
        interval: sums since the last point of the loss curve.
        evaluated_step: the step of the last evaluation on record, -1 before the first.
    """

    step: int = 0
    samples: int = 0
    loader: LoaderState = START
    interval: Interval = Interval()
    evaluated_step: int = -1

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any]) -> Progress:
        """Back from the JSON that `asdict` of this class became."""
        parts: dict[str, Any] = {
            "loader": LoaderState(**facts["loader"]),
            "interval": Interval(**facts["interval"]),
        }
        return cls(**{**facts, **parts})


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Length of the run and what happens every so many steps; 0 is never.

    Attributes:
        steps: of the whole run, those before a resume included.
    """

    steps: int
    report_every: int
    evaluate_every: int
    checkpoint_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a run is made of.

    Attributes:
        trainer: the model with its optimizers.
        loader: training batches.
        schedule: learning rate of the dense parameters.
        embedding_schedule: learning rate of the tables.
        evaluate: scores the model on the test part.
        save: writes a checkpoint of the tensors with this progress.
        sink: takes the events on record.
        live: takes what only a person at a terminal needs.
        check: raises when a signal has asked to stop.
    """

    trainer: Trainer
    loader: Loader
    schedule: Schedule
    embedding_schedule: Schedule
    evaluate: Callable[[], BinaryScores]
    save: Callable[[Progress], Saved]
    sink: Sink
    live: Callable[[Event], None]
    check: Callable[[], None]


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
        run.finish()
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
        self._next_tick = 0.0

    def steps(self) -> None:
        """All steps that are left, with what falls due between them."""
        plan = self._plan
        while self.progress.step < plan.steps:
            if _due(self.progress.step, plan.evaluate_every):
                self.evaluate()
            self._parts.check()
            self._step()
            if _due(self.progress.step, plan.report_every):
                self.report()
            elif time.monotonic() >= self._next_tick:
                self._tick()
            if _due(self.progress.step, plan.checkpoint_every):
                self.save()

    def finish(self) -> None:
        """The last point, scores and checkpoint."""
        self._parts.check()
        self.report()
        self.evaluate()
        self.save()

    def evaluate(self) -> None:
        """Score the model, once for each step at which it falls due."""
        if self.progress.evaluated_step == self.progress.step:
            return
        self._stopwatch.pause()
        start = time.perf_counter()
        scores = self._parts.evaluate()
        seconds = time.perf_counter() - start
        self._emit(Kind.EVALUATED, seconds=seconds, **asdict(scores))
        self.progress = replace(self.progress, evaluated_step=self.progress.step)
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
            timed_rows=rows,
            timed_seconds=seconds,
            timed_cpu_seconds=cpu_seconds,
        )
        self.progress = replace(self.progress, interval=Interval())

    def save(self) -> None:
        """A checkpoint of this step."""
        self._stopwatch.pause()
        start = time.perf_counter()
        saved = self._parts.save(self.progress)
        seconds = time.perf_counter() - start
        self._emit(Kind.SAVED, path=saved.folder.name, num_bytes=saved.num_bytes, seconds=seconds)
        self._stopwatch.resume()

    def _step(self) -> None:
        parts, progress = self._parts, self.progress
        batch, after = parts.loader.read(progress.loader)
        self._lr = parts.schedule.lr(progress.step)
        result = parts.trainer.step(
            torch.from_numpy(batch.dense_BI),
            torch.from_numpy(batch.ids_FB),
            torch.from_numpy(batch.label_B),
            lr=self._lr,
            embedding_lr=parts.embedding_schedule.lr(progress.step),
        )
        loss, rows = float(result.loss), len(batch.label_B)
        if not math.isfinite(loss):
            raise DivergedError(
                f"step {progress.step + 1}: the loss is {loss}; "
                f"optimizer.lr = {self._lr} may be too high"
            )
        interval = progress.interval
        self.progress = Progress(
            step=progress.step + 1,
            samples=progress.samples + rows,
            loader=after,
            interval=Interval(
                rows=interval.rows + rows,
                loss_sum=interval.loss_sum + loss * rows,
                correct=interval.correct + int(result.correct),
            ),
            evaluated_step=progress.evaluated_step,
        )
        self._stopwatch.step_done(rows)

    def _tick(self) -> None:
        interval = self.progress.interval
        values = {
            "samples": self.progress.samples,
            "loss": interval.loss_sum / interval.rows,
            "accuracy": interval.correct / interval.rows,
        }
        self._parts.live(Event(Kind.TICK, self.progress.step, time.time(), values))
        self._next_tick = time.monotonic() + TICK_SECONDS

    def _emit(self, kind: Kind, **values: Any) -> None:
        values = {"samples": self.progress.samples, **values}
        self._parts.sink.write(Event(kind, self.progress.step, time.time(), values))


def _due(step: int, every: int) -> bool:
    return every > 0 and step > 0 and step % every == 0
