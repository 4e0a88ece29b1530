"""What scores that get no better do: end a run, or lower its learning rates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, final

from dlrm_hybrid.telemetry.metrics import BinaryScores

Monitor = Literal["log_loss", "auc"]


@final
@dataclass(frozen=True, slots=True)
class Course:
    """The evaluations of a run until now.

    Attributes:
        best: score; None before the first.
        since_best: evaluations since that one.
        since_lowered: those of them since rates were lowered.
        step: of the last one.
        lowered: the steps from which on rates are lower, each time by the same factor.
    """

    best: float | None = None
    since_best: int = 0
    since_lowered: int = 0
    step: int = -1
    lowered: tuple[int, ...] = ()

    def lowered_at(self, step: int) -> Course:
        """With rates that are lower from this step on."""
        return replace(self, since_lowered=0, lowered=(*self.lowered, step))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a run goes on without a better score.

    What follows from an evaluation is decided at a later step, also by a run that resumes between
    the two.

    Attributes:
        ends_after: evaluations without one; None: it does not end.
        lowers_after: the same, until learning rates are lowered.
        min_delta: a score is better if it is by more than this.
        monitor: which score: a lower log-loss or a higher AUC.
    """

    ends_after: int | None
    lowers_after: int | None
    min_delta: float
    monitor: Monitor

    def after(self, course: Course, scores: BinaryScores, step: int) -> Course:
        """With one more evaluation; an AUC that there is none of is no better one."""
        score, best = scores.log_loss if self.monitor == "log_loss" else scores.auc, course.best
        if score is not None and (best is None or self._gain(best, score) > self.min_delta):
            return replace(course, best=score, since_best=0, since_lowered=0, step=step)
        return replace(
            course,
            since_best=course.since_best + 1,
            since_lowered=course.since_lowered + 1,
            step=step,
        )

    def _gain(self, best: float, score: float) -> float:
        return best - score if self.monitor == "log_loss" else score - best

    def ends(self, course: Course, step: int) -> bool:
        """Whether a run ends before this step."""
        limit = self.ends_after
        return limit is not None and course.step < step and course.since_best >= limit

    def lowers(self, course: Course, step: int) -> bool:
        """Whether learning rates are lower from this step on than before."""
        limit = self.lowers_after
        return limit is not None and course.step < step and course.since_lowered >= limit
