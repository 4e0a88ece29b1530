"""How far a run has come, how far it goes, and what falls due on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dlrm_hybrid.checkpoint.manifest import Monitor, Score
from dlrm_hybrid.data.loader import START, LoaderState
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train.patience import Course, Patience
from dlrm_hybrid.types import DataError, ScoredPart

SYNC_EVERY = 10  # steps, or groups of test batches, between meetings where nothing is due


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come; with the tensors, all that resuming needs.

    Attributes:
        step: steps done.
        samples: rows learned from, of all trainers.
        loader: where the next batch begins.
        interval: sums since the last point of the loss curve.
        evaluated_step: the step of the last evaluation on record that decides, -1 before the first.
        tested_step: the same of those that only tell how good the model is.
        score: of the last one that decides; None in a process that does not report it.
        best: the best score that decides; None as `score`.
        course: of all evaluations, in the process that reports them.
        batches: that each trainer has learned from; empty where all learn from one in each step.
        emptied: the step at which last no batch was in flight, where batches stay there.
    """

    step: int = 0
    samples: int = 0
    loader: LoaderState = START
    interval: Interval = Interval()
    evaluated_step: int = -1
    score: Score | None = None
    best: Score | None = None
    batches: tuple[int, ...] = ()
    emptied: int = 0
    course: Course = Course()
    tested_step: int = -1

    def batches_of(self, trainer: int) -> int:
        """How many batches a trainer has learned from; one that is new as many as steps."""
        return self.batches[trainer] if trainer < len(self.batches) else self.step

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], source: Path) -> Progress:
        """Back from the JSON that `asdict` of this class became.

        Args:
            facts: the JSON.
            source: of the facts, for messages.

        Raises:
            DataError: they are something else; names the field.
        """
        try:
            return TypeAdapter(cls).validate_json(json.dumps(facts), strict=True)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            field = ".".join(str(part) for part in ("progress", *fault["loc"]))
            raise DataError(
                f"{source}: {field!r} is {fault['input']!r:.80}: {fault['msg']}"
            ) from None

    def plus(self, *intervals: Interval) -> Progress:
        """With more sums since the last point."""
        return replace(self, interval=self.interval.plus(*intervals))


@dataclass(frozen=True, slots=True)
class Decision:
    """What all processes do before a step.

    Attributes:
        severity: the highest `StopRequest.severity` of all processes.
        save: a checkpoint, because the last one is long ago.
        ends: the run ends here, because its scores get no better.
        lowers: learning rates are lower from here on, for the same reason.
    """

    severity: int = 0
    save: bool = False
    ends: bool = False
    lowers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Length of the run and what happens every so many steps; 0 is never.

    Attributes:
        steps: of the whole run, those before a resume included.
        samples_per_step: rows of all trainers.
        checkpoint_minutes: at most between checkpoints, up to the next step at which processes
            meet; the leader's clock decides.
        patience: with scores that get no better; None: without end.
        parts: of the rows; all evaluations score the first one, which decides what is best, and
            that at the end all.
        monitor: the score that decides.
        keeps_best: an evaluation that is the best so far saves a checkpoint.
    """

    steps: int
    samples_per_step: int
    report_every: int
    evaluate_every: int
    checkpoint_every: int
    checkpoint_minutes: float
    patience: Patience | None = None
    parts: tuple[ScoredPart, ...] = (ScoredPart.TEST,)
    monitor: Monitor = "log_loss"
    keeps_best: bool = False

    def decision(self, progress: Progress, severity: int, is_late: bool) -> Decision:
        """What follows from what the leader knows.

        Args:
            progress: of the run.
            severity: the highest of all processes.
            is_late: a checkpoint is due by the clock.
        """
        if self.patience is None:
            return Decision(severity, is_late)
        course, step = progress.course, progress.step
        ends = self.patience.ends(course, step)
        return Decision(severity, is_late, ends, not ends and self.patience.lowers(course, step))

    def evaluations(self, progress: Progress, at_end: bool) -> tuple[ScoredPart, ...]:
        """The parts to score now, each once for each step at which it falls due."""
        due = self.parts if at_end else self.parts[:1]
        if not (at_end or is_due(progress.step, self.evaluate_every)):
            return ()
        before = (progress.evaluated_step, progress.tested_step)
        return tuple(part for part, step in zip(due, before, strict=False) if step != progress.step)

    def saves_best(self, step: int) -> bool:
        """Whether an evaluation at this step saves a checkpoint if it is the best so far."""
        return self.keeps_best and is_due(step, self.evaluate_every)

    def is_short(self, step: int) -> bool:
        """Whether a point at this step, the last one, is the mean of fewer steps than all before.

        That of a run with no other is not.
        """
        return step > self.report_every > 0 and step % self.report_every > 0

    def meets(self, step: int) -> bool:
        """Whether processes decide together how to go on before this step, or at the end."""
        judges = self.patience is not None and is_due(step - 1, self.evaluate_every)
        return self.anything_due(step) or judges or step % SYNC_EVERY == 0

    def next_rest(self, step: int) -> int:
        """The first step after this one with an evaluation or a checkpoint, or the end of the run.

        There trainers that do not wait for each other come to rest.
        """
        periods = [every for every in (self.evaluate_every, self.checkpoint_every) if every]
        return min([self.steps, *((step // every + 1) * every for every in periods)])

    def anything_due(self, step: int) -> bool:
        """Whether anything falls due at this step, the end of the run included."""
        periods = (self.report_every, self.evaluate_every, self.checkpoint_every)
        return step >= self.steps or any(is_due(step, every) for every in periods)


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps falls due at `step`; 0 is never."""
    return every > 0 and step > 0 and step % every == 0
