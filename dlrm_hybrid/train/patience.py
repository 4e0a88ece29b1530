"""Patience: a run without better scores ends, or lowers its learning rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from dlrm_hybrid.bounds import Monitor
from dlrm_hybrid.checkpoint.manifest import Score
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.types import ScoredPart


def monitored(scores: BinaryScores, part: ScoredPart, monitor: Monitor) -> Score | None:
    """The score that decides which model is better; None if it is undefined (one class)."""
    value: float | None = getattr(scores, monitor)
    return None if value is None else Score(part=part, monitor=monitor, value=value)


@final
@dataclass(frozen=True, slots=True)
class Course:
    """The course of a run's evaluations so far.

    Attributes:
        best: best score; None before the first.
        since_best: number of evaluations since that one.
        since_lowered: number of those since rates were lowered.
        step: step of the last evaluation.
        lowered: first steps of lower rates, each by the same factor.
    """

    best: float | None = None
    since_best: int = 0
    since_lowered: int = 0
    step: int = -1
    lowered: tuple[int, ...] = ()

    def lowered_at(self, step: int) -> Course:
        """The course with lower rates from this step on."""
        return replace(self, since_lowered=0, lowered=(*self.lowered, step))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """Rule for how long a run goes on without a better score.

    An evaluation's consequence is decided at a later step, so also by a run that resumes between.

    Attributes:
        ends_after: number of evaluations until it ends; None: never.
        lowers_after: number until learning rates are lowered; None: never.
        min_delta: a better score gains more than this.
    """

    ends_after: int | None
    lowers_after: int | None
    min_delta: float

    def after(self, course: Course, score: Score | None, step: int) -> Course:
        """The course with one more evaluation; an undefined AUC is not better."""
        best = course.best
        if score is not None and (best is None or score.gain(best) > self.min_delta):
            return replace(course, best=score.value, since_best=0, since_lowered=0, step=step)
        return replace(
            course,
            since_best=course.since_best + 1,
            since_lowered=course.since_lowered + 1,
            step=step,
        )

    def ends(self, course: Course, step: int) -> bool:
        """Whether a run ends before this step."""
        limit = self.ends_after
        return limit is not None and course.step < step and course.since_best >= limit

    def lowers(self, course: Course, step: int) -> bool:
        """Whether learning rates are lower from this step on than before."""
        limit = self.lowers_after
        return limit is not None and course.step < step and course.since_lowered >= limit
