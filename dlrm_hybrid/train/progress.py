"""Progress of a run, its length, and the events that are due on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dlrm_hybrid.bounds import Monitor
from dlrm_hybrid.checkpoint.manifest import Score
from dlrm_hybrid.data.loader import START, LoaderState
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train.patience import Course, Patience
from dlrm_hybrid.types import DataError, ScoredPart

SYNC_EVERY = 10  # steps, or groups of batches in evaluations, between meetings without cause


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a run; with the tensors, all that resuming needs.

    Attributes:
        step: number of steps done.
        samples: number of rows trained on, by all trainers.
        loader: position of the next batch.
        interval: sums since the last point of the loss curve.
        evaluated_step: step of the last recorded evaluation on the part that decides, or -1.
        tested_step: step of the last evaluation on the other part, or -1.
        score: score of the last deciding evaluation; None before the first.
        best: the best deciding score; None as for `score`.
        course: course of all evaluations.
        batches: number done by each trainer; empty if each step has one of each.
        emptied: last step with no batch in flight, if steps leave any there.
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
        """Number of batches a trainer has done; a new trainer counts the steps."""
        return self.batches[trainer] if trainer < len(self.batches) else self.step

    @classmethod
    def from_facts(cls, facts: Mapping[str, Any], source: Path) -> Progress:
        """Parse the JSON that `asdict` of this class became.

        Args:
            facts: the JSON.
            source: file of the facts, for messages.

        Raises:
            DataError: they do not fit; names the field.
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
        """The progress with more sums since the last point."""
        return replace(self, interval=self.interval.plus(*intervals))


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision before a step.

    Attributes:
        severity: the highest `StopRequest.severity` of all processes.
        save: whether to save a checkpoint, because the last one is long ago.
        ends: whether the run ends here, because scores no longer improve.
        lowers: whether learning rates are lowered here, for the same reason.
    """

    severity: int = 0
    save: bool = False
    ends: bool = False
    lowers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Length of a run, and the periods of its events, in steps; 0 is never.

    Attributes:
        steps: number in the whole run, including those before a resume.
        samples_per_step: number of rows of all trainers.
        checkpoint_minutes: longest time between checkpoints, up to the next meeting.
        patience: rule for scores that no longer improve; None for none.
        parts: parts of the rows to score; evaluations score the first one, which decides what is
            best, and the last evaluation all.
        scores_first: whether the only evaluation is that before the first step.
        monitor: the score that decides.
        keeps_best: whether an evaluation with the best score saves a checkpoint.
    """

    steps: int
    samples_per_step: int
    report_every: int = 0
    evaluate_every: int = 0
    checkpoint_every: int = 0
    checkpoint_minutes: float = 0.0
    patience: Patience | None = None
    parts: tuple[ScoredPart, ...] = (ScoredPart.TEST,)
    scores_first: bool = False
    monitor: Monitor = "log_loss"
    keeps_best: bool = False

    def decision(self, progress: Progress, severity: int, is_late: bool) -> Decision:
        """Decide what to do before a step.

        Args:
            progress: progress of the run.
            severity: the highest of all processes.
            is_late: whether a checkpoint is due by the clock.
        """
        if self.patience is None:
            return Decision(severity, is_late)
        course, step = progress.course, progress.step
        ends = self.patience.ends(course, step)
        return Decision(severity, is_late, ends, not ends and self.patience.lowers(course, step))

    def evaluations(self, progress: Progress, at_end: bool) -> tuple[ScoredPart, ...]:
        """The parts to score now, each once per step where it is due."""
        parts = self.parts if at_end else self.parts[:1]
        if self.scores_first:
            is_now = progress.step == 0
        else:
            is_now = at_end or is_due(progress.step, self.evaluate_every)
        if not is_now:
            return ()
        last = (progress.evaluated_step, progress.tested_step)
        return tuple(part for part, step in zip(parts, last, strict=False) if step != progress.step)

    def saves_best(self, step: int) -> bool:
        """Whether an evaluation at this step saves a checkpoint if its score is the best."""
        return self.keeps_best and is_due(step, self.evaluate_every)

    def is_short(self, step: int) -> bool:
        """Whether a point at this step is the mean of fewer steps than all points before it.

        The only point of a run is not short.
        """
        return step > self.report_every > 0 and step % self.report_every > 0

    def meets(self, step: int) -> bool:
        """Whether reports come together before this step, or at the end, to decide."""
        judges = self.patience is not None and is_due(step - 1, self.evaluate_every)
        return self.anything_due(step) or judges or step % SYNC_EVERY == 0

    def next_meeting(self, step: int) -> int:
        """The first step after this one before which reports come together."""
        return next(later for later in count(step + 1) if self.meets(later))

    def next_rest(self, step: int) -> int:
        """The next step with an evaluation or a checkpoint, or the end of the run.

        There trainers that otherwise do not wait for each other come to rest.
        """
        periods = [period for period in (self.evaluate_every, self.checkpoint_every) if period]
        return min([self.steps, *((step // period + 1) * period for period in periods)])

    def anything_due(self, step: int) -> bool:
        """Whether anything is due at this step, the end of the run included."""
        periods = (self.report_every, self.evaluate_every, self.checkpoint_every)
        return step >= self.steps or any(is_due(step, period) for period in periods)


def is_due(step: int, every: int) -> bool:
    """Whether something with this period in steps is due at `step`; 0 is never."""
    return every > 0 and step > 0 and step % every == 0
