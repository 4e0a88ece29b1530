"""What a leader has told a trainer to do, and how far its workers have come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, final

from dlrm_hybrid.parallel.step import StepMetrics

Order = Mapping[str, Any]
"""What to do, and with what."""

AHEAD = 1  # leases that a trainer is given while it learns: it never waits for this rank's answer


@final
@dataclass(slots=True)
class Orders:
    """What one trainer has been told, and how much of it its workers have done.

    Attributes:
        told: its orders; all of its workers are given the same ones.
        forgotten: so many of them are empty by now.
        done: of each of its workers that is there, how many of these it has done.
        sent: of each of these, how many it has been sent.
        learned: of each of them, batches since the run began.
        skipped: by how much they count more than these.
        join: says where its workers begin if they have been started again; `told` when that can be.
        writing: those whose part of a checkpoint has not been asked for yet.
        metrics: with the number of batches after which they were told, which not all have learned.
    """

    told: list[Order] = field(default_factory=list[Order])
    forgotten: int = 0
    done: dict[int, int] = field(default_factory=dict[int, int])
    sent: dict[int, int] = field(default_factory=dict[int, int])
    learned: dict[int, int] = field(default_factory=dict[int, int])
    skipped: int = 0
    join: Order = field(default_factory=dict[str, Any])
    writing: set[int] = field(default_factory=set[int])
    metrics: list[tuple[int, StepMetrics]] = field(default_factory=list[tuple[int, StepMetrics]])

    @property
    def may_leave(self) -> bool:
        """Whether it has begun, and no checkpoint waits for its part."""
        return bool(self.told) and not self.writing

    def note(self, rank: int, learned: int, metrics: StepMetrics) -> None:
        """A worker has learned from so many batches, as it counts."""
        self.learned[rank] = learned - self.skipped
        self.metrics.append((self.learned[rank], metrics))

    def metrics_until(self, learned: int) -> StepMetrics:
        """What was told of so many batches, once.

        That of later ones is lost if the trainer is: these batches are learned again.
        """
        told = [metrics for at, metrics in self.metrics if at <= learned]
        self.metrics = [one for one in self.metrics if one[0] > learned]
        return reduce(StepMetrics.plus, told, StepMetrics())

    def unsent(self, stages: int) -> list[tuple[int, int, Order]]:
        """What workers that are there have not been sent, with its number; taken for sent.

        Forgets what all of them have done, but for the last order.
        """
        if len(self.done) == stages:
            done = max(self.forgotten, min(*self.done.values(), len(self.told) - 1))
            self.told[self.forgotten : done] = [{}] * (done - self.forgotten)
            self.forgotten = done
        found = [
            (worker, number, self.told[number])
            for worker in self.done
            for number in range(self.sent.get(worker, 0), len(self.told))
        ]
        self.sent = dict.fromkeys(self.done, len(self.told))
        return found

    def can_have(self, stages: int, ahead: int) -> bool:
        """Whether it may be given batches: it has that many leases, or fewer, and nothing else."""
        is_learning = bool(self.told) and self.told[-1]["do"] == "learn"
        due = len(self.told) - (ahead if is_learning else 0)
        return len(self.done) == stages and min(self.done.values()) >= due

    def has_done(self, rank: int) -> bool:
        """Whether a worker is there and has nothing to do."""
        return self.done.get(rank) == len(self.told)
