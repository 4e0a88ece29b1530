"""Runners of workers' programs: one worker in its own process, or all workers of a world."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, final

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.mailbox import Mailbox, Receive, SharedMailbox
from dlrm_hybrid.parallel.effects import GroupCall, Outgoing, Program, Result, StepEffect
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import DeadlineError, DlrmError
from dlrm_hybrid.wire.frame import Frame


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRunner:
    """Carries out the effects of one worker at once.

    Attributes:
        mailbox: mailbox of the worker; a shared one lets several threads run programs.
        patience_seconds: how long to wait for a frame.
        clock: measures when the program computes.
    """

    mailbox: Mailbox | SharedMailbox
    patience_seconds: float
    clock: SpanClock

    def run(self, program: Program[Result]) -> Result:
        """Run a program to its end; returns its result.

        Raises:
            DlrmError: what the program, the mailbox and the channel raise.
        """
        computing = self.clock.within(Span.COMPUTE)
        answer: Any = None
        with closing(program):  # its locks are released even if waiting fails
            while True:
                try:
                    with computing:
                        effect = program.send(answer)
                except StopIteration as end:
                    return end.value
                if not isinstance(effect, Receive):  # others of a group are in other processes
                    raise DlrmError(f"internal error: a rank of its own cannot answer {effect!r}")
                # Waiting counts even if another thread receives.
                with self.clock.waiting(effect.kind.name.lower()):
                    if effect.waits:
                        answer = self.mailbox.take(effect, self.patience_seconds)
                    else:
                        answer = self.mailbox.take_now(effect)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class InProcessRunner:
    """Interleaves the programs of all workers of a world; servers answer at once.

    The reference for worlds of processes, and the fast way to many runs on a small machine.

    Attributes:
        mailboxes: one per worker rank.
        servers: channel and handler of every server.
        clock: measures when programs compute.
    """

    mailboxes: Mapping[int, Mailbox]
    servers: Sequence[tuple[Channel, Callable[[Frame], Iterable[Outgoing]]]]
    clock: SpanClock

    def run(self, programs: Mapping[int, Program[Result]]) -> dict[int, Result]:
        """Run one program for each worker to its end; returns the results by rank.

        Raises:
            DlrmError: deadlock; the message names each rank's effect.
        """
        turn = _Turn(self, dict(programs))
        for rank in programs:
            turn.advance(rank, None)
        while turn.waiting:
            if not (turn.answer() | self._serve()):
                raise DlrmError(f"deadlock: {turn.waiting}")
        self._serve()  # the last pushes
        return turn.results

    def _serve(self) -> bool:
        """Let every server handle its frames; False if there were none."""
        served = False
        for channel, handle in self.servers:
            while (frame := _receive_now(channel)) is not None:
                served = True
                for outgoing in handle(frame):
                    channel.send(*outgoing)
        return served


@dataclass(slots=True)
class _Turn:
    """Progress of all programs: the effect each waits for, and the results of those that ended."""

    world: InProcessRunner
    programs: dict[int, Program[Any]]
    waiting: dict[int, StepEffect] = field(default_factory=dict[int, StepEffect])
    results: dict[int, Any] = field(default_factory=dict[int, Any])

    def advance(self, rank: int, value: Any) -> None:
        """Send a program the result of its effect, and note its next one."""
        try:
            with self.world.clock.within(Span.COMPUTE):
                self.waiting[rank] = self.programs[rank].send(value)
        except StopIteration as end:
            self.waiting.pop(rank, None)
            self.results[rank] = end.value

    def answer(self) -> bool:
        """Carry out every effect that can be carried out; False if none could."""
        answered = False
        for rank, effect in list(self.waiting.items()):
            if self.waiting.get(rank) is not effect:
                continue  # advanced with the rest of its group
            if isinstance(effect, GroupCall):
                answered |= self._answer_group(effect)
                continue
            frame = self.world.mailboxes[rank].take_now(effect)
            if frame is not None or not effect.waits:
                self.advance(rank, frame)
                answered = True
        return answered

    def _answer_group(self, effect: GroupCall) -> bool:
        """Compute for a group once all its ranks have asked for it; False before that."""
        effects = [self.waiting.get(rank) for rank in effect.group]
        calls = [call for call in effects if isinstance(call, GroupCall)]
        if len(calls) < len(effects) or any(call.compute != effect.compute for call in calls):
            return False
        results = effect.compute([call.value for call in calls])
        for rank, result in zip(effect.group, results, strict=True):
            self.advance(rank, result)
        return True


def _receive_now(channel: Channel) -> Frame | None:
    try:
        return channel.receive(0.0)
    except DeadlineError:
        return None
