"""A world of one process: the steps of all workers run in turns, servers answer at once.

It is the oracle of the world of processes, and the fast way to many runs on a small machine.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, final

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.parallel.effects import Effect, LearnEmbeddings, Lookup, Receive
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.parallel.tables.shared import WorldTables
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import DeadlineError, DlrmError
from dlrm_hybrid.wire.frame import Frame

Result = TypeVar("Result")
Program = Generator[Effect, Any, Result]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessWorld:
    """What the workers of a world share.

    Attributes:
        mailboxes: of every worker, by rank.
        servers: channel and handler of every server.
        tables: of all trainers.
        interaction_group: ranks whose workers look up, in trainer order.
        clock: told when programs compute and when the tables do.
    """

    mailboxes: Mapping[int, Mailbox]
    servers: Sequence[tuple[Channel, Callable[[Frame], Sequence[Outgoing]]]]
    tables: WorldTables
    interaction_group: tuple[int, ...]
    clock: SpanClock

    def run(self, programs: Mapping[int, Program[Result]]) -> dict[int, Result]:
        """Run one program for each worker to its end; results by rank.

        Raises:
            DlrmError: nobody can go on; the message says who waits for what.
        """
        turn = _Turn(self, dict(programs))
        for rank in programs:
            turn.advance(rank, None)
        while turn.waiting:
            if not (turn.answer() | self._serve()):
                raise DlrmError(f"the world stands still: {turn.waiting}")
        return turn.results

    def _serve(self) -> bool:
        """Let every server take what has come for it; whether there was anything."""
        served = False
        for channel, handle in self.servers:
            while (frame := _receive_now(channel)) is not None:
                served = True
                for outgoing in handle(frame):
                    channel.send(*outgoing)
        return served


@dataclass(slots=True)
class _Turn:
    """Programs on their way: what each waits for, and what the finished ones gave."""

    world: InProcessWorld
    programs: dict[int, Program[Any]]
    waiting: dict[int, Effect] = field(default_factory=dict[int, Effect])
    results: dict[int, Any] = field(default_factory=dict[int, Any])

    def advance(self, rank: int, value: Any) -> None:
        """Give a program what it waits for, and note what it wants next."""
        try:
            with self.world.clock.within(Span.COMPUTE):
                self.waiting[rank] = self.programs[rank].send(value)
        except StopIteration as end:
            self.waiting.pop(rank, None)
            self.results[rank] = end.value

    def answer(self) -> bool:
        """Answer whatever can be answered; whether there was anything."""
        answered = self._answer_tables()
        for rank, effect in list(self.waiting.items()):
            if isinstance(effect, Receive):
                frame = self.world.mailboxes[rank].take_now(effect)
                if frame is not None:
                    self.advance(rank, frame)
                    answered = True
        return answered

    def _answer_tables(self) -> bool:
        """Lookups and gradients are answered together, once all trainers ask for the same."""
        group = self.world.interaction_group
        embedding = self.world.clock.within(Span.EMBEDDING)
        effects = [self.waiting.get(rank) for rank in group]
        lookups = [effect for effect in effects if isinstance(effect, Lookup)]
        if len(lookups) == len(group):
            with embedding:
                found = self.world.tables.lookup(lookups)
            for rank, pooled_BFD in zip(group, found, strict=True):
                self.advance(rank, pooled_BFD)
            return True
        gradients = [effect for effect in effects if isinstance(effect, LearnEmbeddings)]
        if len(gradients) == len(group):
            with embedding:
                self.world.tables.learn(gradients)
            for rank in group:
                self.advance(rank, None)
            return True
        return False


def _receive_now(channel: Channel) -> Frame | None:
    try:
        return channel.receive(0.0)
    except DeadlineError:
        return None
