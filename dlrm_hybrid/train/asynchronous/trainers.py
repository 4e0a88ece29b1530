"""The trainers that a leader keeps busy: the orders of each, and those done.

Who is there, its `Leases` say; `Rank` and `Membership` say who is restarted with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, final

from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger, message
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.types import DeadlineError
from dlrm_hybrid.wire.frame import Kind

Order = Mapping[str, Any]
"""An order to a trainer: what to do (`do`), and its arguments."""

AHEAD = 1  # leases that a trainer has in advance, so that it never waits for the leader's answer


@final
@dataclass(slots=True, kw_only=True)
class Trainer:
    """One incarnation of a trainer: its orders, and how many of them its workers have done.

    Attributes:
        stages: number of its workers.
        incarnation: how often it was started before.
        is_leaving: whether it is to leave as soon as possible.
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

    stages: int
    incarnation: int = 0
    is_leaving: bool = False
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
        """Whether it is to leave, has begun, and no checkpoint waits for its shards."""
        return self.is_leaving and bool(self.told) and not self.writing

    def note(self, rank: int, learned: int, metrics: StepMetrics) -> None:
        """Record a worker's metrics after so many batches, as it counts."""
        self.learned[rank] = learned - self.skipped
        self.metrics.append((self.learned[rank], metrics))

    def metrics_until(self, learned: int) -> StepMetrics:
        """Take the sum of the metrics up to so many batches.

        Metrics of later batches are dropped with a lost trainer: these batches are done again.
        """
        sums = [metrics for at, metrics in self.metrics if at <= learned]
        self.metrics = [entry for entry in self.metrics if entry[0] > learned]
        return reduce(StepMetrics.plus, sums, StepMetrics())

    def unsent(self) -> list[tuple[int, int, Order]]:
        """Mark as sent, and return with their numbers, the orders that present workers lack.

        Drops the orders that all of them have done, except the last.
        """
        if len(self.done) == self.stages:
            count = max(self.forgotten, min(*self.done.values(), len(self.told) - 1))
            self.told[self.forgotten : count] = [{}] * (count - self.forgotten)
            self.forgotten = count
        orders = [
            (worker, number, self.told[number])
            for worker in self.done
            for number in range(self.sent.get(worker, 0), len(self.told))
        ]
        self.sent = dict.fromkeys(self.done, len(self.told))
        return orders

    def can_have(self, ahead: int) -> bool:
        """Whether it may get batches: it has no orders to do but at most `ahead` leases."""
        is_learning = bool(self.told) and self.told[-1]["do"] == "learn"
        due = len(self.told) - (ahead if is_learning else 0)
        return len(self.done) == self.stages and min(self.done.values()) >= due


@final
@dataclass(slots=True)
class Trainers:
    """All trainers of one attempt of a run, by number; orders go to them from here.

    Attributes:
        topology: ranks and roles of the world.
        messenger: to the other ranks; its mailbox handles the frames to this one.
        losses: ranks of workers of lost trainers, in order, once per loss.
        lost: number of losses.
        left: number of orderly departures, with nothing under way.
        redone: number of batches of lost trainers that were given out again.
    """

    topology: Topology
    messenger: Messenger
    losses: list[int] = field(default_factory=list[int])
    lost: int = 0
    left: int = 0
    redone: int = 0
    _incarnations: list[Trainer] = field(init=False)

    def __post_init__(self) -> None:
        stages = self.topology.stages
        self._incarnations = [Trainer(stages=stages) for _ in range(self.topology.trainers)]

    def __getitem__(self, number: int) -> Trainer:
        return self._incarnations[number]

    def workers(self, trainers: Collection[int]) -> list[int]:
        """Ranks of all workers of these trainers."""
        stages = range(self.topology.stages)
        return [self.topology.worker(trainer, stage) for trainer in trainers for stage in stages]

    def lose(
        self, number: int, incarnation: int, *, redone: int, skipped: int, join: Order, left: bool
    ) -> Trainer:
        """Record that a trainer is lost; returns the one that takes its place.

        Args:
            number: number of the trainer.
            incarnation: higher than those of its lost workers.
            redone: number of batches it had under way.
            skipped: by how much the new one's own count of batches is higher.
            join: its order to join.
            left: whether it left with a goodbye.
        """
        self.losses += self.workers([number])
        self.left += left
        self.lost += not left
        self.redone += redone
        self._incarnations[number] = successor = Trainer(
            stages=self.topology.stages,
            incarnation=incarnation,
            skipped=skipped,
            join=join,
        )
        return successor

    def tell(self, number: int, order: Order) -> list[Outgoing]:
        """Add an order for a trainer; returns the frames to send its workers now."""
        self[number].told.append(order)
        return self.unsent(number)

    def unsent(self, number: int) -> list[Outgoing]:
        """The frames with orders that a trainer's present workers have not been sent."""
        rank, attempt = self.messenger.rank, self.messenger.attempt
        return [
            Outgoing(worker, message(Kind.DECISION, rank, attempt, place, order), 0)
            for worker, place, order in self[number].unsent()
        ]

    def command(self, order: Order, trainers: Sequence[int]) -> None:
        """Send the same order to several trainers, which are at rest."""
        for number in trainers:
            self.send(self.tell(number, order))

    def send(self, frames: Sequence[Outgoing]) -> None:
        """Send frames in this order."""
        for outgoing in frames:
            self.messenger.channel.send(*outgoing)

    def wait(self, is_done: Callable[[], bool]) -> None:
        """Handle frames until a condition holds.

        Raises:
            DeadlineError: no frame arrived for too long; holds the ranks that are busy.
        """
        patience_seconds = self.messenger.patience_seconds
        try:
            self.messenger.mailbox.wait_until(is_done, patience_seconds)
        except DeadlineError:
            busy = [rank for rank in range(self.topology.num_workers) if not self._has_done(rank)]
            names = ", ".join(f"{self.topology.name(rank)} (rank {rank})" for rank in busy)
            raise DeadlineError(
                f"rank {self.messenger.rank}: nobody has said anything for {patience_seconds:g} s; "
                f"batches are with {names}",
                busy,
            ) from None

    def are_at_rest(self, trainers: Collection[int]) -> bool:
        """Whether these trainers, of which there are some, have done their orders."""
        return bool(trainers) and all(map(self._has_done, self.workers(trainers)))

    def _has_done(self, rank: int) -> bool:
        trainer = self[rank // self.topology.stages]
        return trainer.done.get(rank) == len(trainer.told)
