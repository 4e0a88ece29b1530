"""What a planned worker does to tables: its own, those that trainers share, those on servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.step import StepTables
from dlrm_hybrid.plan.simulation.machine import HANDOVER, Rank
from dlrm_hybrid.plan.simulation.machine import Program as Simulated
from dlrm_hybrid.plan.simulation.parts import TENSOR, frame_key
from dlrm_hybrid.types import BatchNumber
from dlrm_hybrid.wire.frame import Kind


@final
@dataclass(frozen=True, slots=True)
class LocalTables(StepTables):
    """Tables of this worker alone; half of the time is the lookup's."""

    rank: Rank
    seconds: float

    @override
    def prefetch(self, batch: BatchNumber, bags: Any) -> None:
        pass

    @override
    def lookup(self, batch: BatchNumber, bags: Any, lr: float) -> Program[Any]:
        yield from ()
        self.rank.work(self.seconds / 2)
        return TENSOR

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Any) -> Program[None]:
        yield from ()
        self.rank.work(self.seconds / 2)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedTables(StepTables):
    """Tables of which every trainer has a part: exchanges between all of them.

    Attributes:
        rank: of the worker.
        others: ranks with which it exchanges.
        phases: bytes of the frame to each of them in each exchange; the last follows backward.
        seconds: of a step, without exchanges.
    """

    rank: Rank
    others: Sequence[int]
    phases: Sequence[float]
    seconds: float

    @override
    def prefetch(self, batch: BatchNumber, bags: Any) -> None:
        pass

    @override
    def lookup(self, batch: BatchNumber, bags: Any, lr: float) -> Program[Any]:
        last = len(self.phases) - 1
        for phase, size in enumerate(self.phases[:last]):
            self.rank.work(self.seconds / 2 / last)
            yield from self._exchange(batch, phase, size)
        return TENSOR

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Any) -> Program[None]:
        last = len(self.phases) - 1
        yield from self._exchange(batch, last, self.phases[last])
        self.rank.work(self.seconds / 2)

    def _exchange(self, batch: BatchNumber, phase: int, size: float) -> Simulated:
        """As gloo does: nobody sends before the receiver has said that it is ready.

        A thread of the group does it, which is woken up and wakes up who waits for it.
        """
        rank, mine = self.rank, (self.rank.rank, batch)
        yield HANDOVER
        for other in self.others:
            rank.signal(other, frame_key(Kind.HELLO, *mine, round=phase))
        for other in self.others:
            yield Receive(Kind.HELLO, other, batch, round=phase)
            rank.send(other, frame_key(Kind.LOOKUP, *mine, round=phase), size)
        for other in self.others:
            yield Receive(Kind.LOOKUP, other, batch, round=phase)
        yield HANDOVER


@final
@dataclass(slots=True, kw_only=True)
class ServedTables(StepTables):
    """Tables on table servers.

    Attributes:
        rank: of the worker.
        servers: ranks of the table servers.
        ask_bytes: of a lookup to each of them.
        update_bytes: of an update to each of them.
        seconds: of a step in the worker.
    """

    rank: Rank
    servers: Sequence[int]
    ask_bytes: float
    update_bytes: float
    seconds: float
    _asked: int = -1

    @override
    def prefetch(self, batch: BatchNumber, bags: Any) -> None:
        if batch <= self._asked:
            return
        self._asked = batch
        self.rank.work(self.seconds / 3)
        for server in self.servers:
            self.rank.send(server, frame_key(Kind.LOOKUP, self.rank.rank, batch), self.ask_bytes)

    @override
    def lookup(self, batch: BatchNumber, bags: Any, lr: float) -> Program[Any]:
        for server in self.servers:
            yield Receive(Kind.ROWS, server, batch)
        self.rank.work(self.seconds / 3)
        return TENSOR

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Any) -> Program[None]:
        yield from ()
        self.rank.work(self.seconds / 3)
        for server in self.servers:
            self.rank.send(server, frame_key(Kind.UPDATE, self.rank.rank, batch), self.update_bytes)
