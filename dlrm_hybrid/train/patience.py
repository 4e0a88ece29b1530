"""When a run ends early: evaluations in a row without a better score."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    best: float | None = None
    since_best: int = 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a run goes on without a better score.

    Attributes:
        evaluations: without one after which it ends.
        min_delta: a score is better if it is by more than this.
        monitor: which score: a lower log-loss or a higher AUC.
    """

    evaluations: int
    min_delta: float
    monitor: Monitor

    def after(self, course: Course, scores: BinaryScores) -> Course:
        """With one more evaluation; an AUC that there is none of is no better one."""
        score = scores.log_loss if self.monitor == "log_loss" else scores.auc
        if score is None:
            return Course(course.best, course.since_best + 1)
        best = course.best
        if best is not None:
            gain = best - score if self.monitor == "log_loss" else score - best
            if gain <= self.min_delta:
                return Course(best, course.since_best + 1)
        return Course(score, 0)

    def is_over(self, course: Course) -> bool:
        """Whether a run ends."""
        return course.since_best >= self.evaluations
