"""Dispatch of the leader's orders to trainers, and waiting until they are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import final

from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger, message
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.train.asynchronous.attendance import Attendance
from dlrm_hybrid.train.asynchronous.orders import Order, Orders
from dlrm_hybrid.types import DeadlineError
from dlrm_hybrid.wire.frame import Kind


@final
@dataclass(slots=True)
class Dispatch:
    """Sends the leader's orders to all trainers.

    Attributes:
        topology: ranks and roles of the world.
        messenger: to the other ranks; its mailbox handles the frames to this one.
        attendance: of the trainers.
        orders: those of each trainer.
    """

    topology: Topology
    messenger: Messenger
    attendance: Attendance
    orders: list[Orders] = field(init=False)

    def __post_init__(self) -> None:
        self.orders = [Orders() for _ in range(self.topology.trainers)]

    def tell(self, trainer: int, order: Order) -> list[Outgoing]:
        """Add an order for a trainer; returns the frames to send its workers now."""
        self.orders[trainer].told.append(order)
        return self.unsent(trainer)

    def unsent(self, trainer: int) -> list[Outgoing]:
        """The frames with orders that a trainer's present workers have not been sent."""
        rank, attempt = self.messenger.rank, self.messenger.attempt
        return [
            Outgoing(worker, message(Kind.DECISION, rank, attempt, number, order), 0)
            for worker, number, order in self.orders[trainer].unsent(self.topology.stages)
        ]

    def command(self, order: Order, trainers: Sequence[int]) -> None:
        """Send the same order to several trainers, which are at rest."""
        for trainer in trainers:
            self.send(self.tell(trainer, order))

    def send(self, several: Sequence[Outgoing]) -> None:
        """Send frames in this order."""
        for outgoing in several:
            self.messenger.channel.send(*outgoing)

    def wait_for_all(self) -> None:
        """Wait until all present trainers have done their orders; see `wait`."""
        self.wait(self._all_wait)

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

    def _all_wait(self) -> bool:
        present = self.attendance.present
        return bool(present) and all(map(self._has_done, self.attendance.workers(present)))

    def _has_done(self, rank: int) -> bool:
        return self.orders[rank // self.topology.stages].has_done(rank)
