"""Runs a worker's program in a process of its own: every effect is carried out at once."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeVar, final

from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.parallel.effects import Effect, LearnEmbeddings, Lookup, Receive
from dlrm_hybrid.parallel.tables.shared import OwnTables
from dlrm_hybrid.telemetry.spans import Span, SpanClock

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a worker's process has around it.

    Attributes:
        mailbox: of its frames.
        tables: for its lookups; None where the interaction is not.
        patience_seconds: how long to wait for a frame.
        clock: told when the program computes and when the tables do.
    """

    mailbox: Mailbox
    tables: OwnTables | None
    patience_seconds: float
    clock: SpanClock

    def run(self, program: Generator[Effect, Any, Result]) -> Result:
        """The result of a program.

        Raises:
            DlrmError: what the program, the mailbox and the channel raise.
        """
        computing = self.clock.within(Span.COMPUTE)
        answer: Any = None
        while True:
            try:
                with computing:
                    effect = program.send(answer)
            except StopIteration as end:
                return end.value
            answer = self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> Any:
        if isinstance(effect, Receive):
            return self.mailbox.take(effect, self.patience_seconds)
        assert self.tables is not None, "only the stage with the interaction looks up"
        with self.clock.within(Span.EMBEDDING):
            if isinstance(effect, Lookup):
                return self.tables.lookup(effect)
            assert isinstance(effect, LearnEmbeddings)
            self.tables.learn(effect)
        return None
