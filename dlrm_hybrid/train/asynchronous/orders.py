"""Orders of the leader to one trainer, and its workers' progress with them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, final

from dlrm_hybrid.parallel.step import StepMetrics

Order = Mapping[str, Any]
"""An order to a trainer: what to do (`do`), and its arguments."""

AHEAD = 1  # leases that a trainer has in advance, so that it never waits for the leader's answer


@final
@dataclass(slots=True)
class Orders:
    """The orders of one trainer, and how many of them its workers have done.

    Attributes:
        told: its orders, the same for all of its workers.
        forgotten: number of the first ones that are dropped, as empty orders.
        done: by present worker, number of orders done.
        sent: by present worker, number of orders sent.
        learned: by present worker, number of batches done since the run began.
        skipped: by how much the workers' own count of batches is higher.
        join: order to join at a batch, for restarted workers; added to `told` once they may.
        writing: workers whose shard of a checkpoint has not been fetched yet.
        metrics: metrics of batches not done by all workers, with the number of batches then.
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
        """Whether it has begun, and no checkpoint waits for its shards."""
        return bool(self.told) and not self.writing

    def note(self, rank: int, learned: int, metrics: StepMetrics) -> None:
        """Record a worker's metrics after so many batches, as it counts."""
        self.learned[rank] = learned - self.skipped
        self.metrics.append((self.learned[rank], metrics))

    def metrics_until(self, learned: int) -> StepMetrics:
        """Take the sum of the metrics up to so many batches.

        Metrics of later batches are dropped with a lost trainer: these batches are done again.
        """
        told = [metrics for at, metrics in self.metrics if at <= learned]
        self.metrics = [one for one in self.metrics if one[0] > learned]
        return reduce(StepMetrics.plus, told, StepMetrics())

    def unsent(self, stages: int) -> list[tuple[int, int, Order]]:
        """Mark as sent, and return with their numbers, the orders that present workers lack.

        Drops the orders that all of them have done, except the last.
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
        """Whether it may get batches: it has no orders to do but at most `ahead` leases."""
        is_learning = bool(self.told) and self.told[-1]["do"] == "learn"
        due = len(self.told) - (ahead if is_learning else 0)
        return len(self.done) == stages and min(self.done.values()) >= due

    def has_done(self, rank: int) -> bool:
        """Whether a worker is present and has done all orders."""
        return self.done.get(rank) == len(self.told)
