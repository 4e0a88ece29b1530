"""Table order by arrival: lookups see the newest rows, and each update is applied at once.

The version is the number of updates applied since the run began. So results depend on the order in
which messages come, and on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, final

from typing_extensions import override

from dlrm_hybrid.parallel.tables.order import (
    Action,
    Answer,
    Apply,
    BatchOf,
    Prediction,
    Question,
    TableOrder,
    TableState,
)
from dlrm_hybrid.types import DlrmError, Version


class Due(NamedTuple):
    """A thread's turns that were looked up, but not updated: `begin` to `end - 1`."""

    begin: int
    end: int


@final
@dataclass(frozen=True, slots=True)
class TableArrivals(TableState):
    """A table server's immutable state, where trainers do not wait for each other.

    A trainer counts its own batches, of which each of its threads has every H-th, and is in order
    by itself. The first lookup of a thread says where it begins, as does one that leaves a gap: a
    trainer that was lost and has rejoined.

    Attributes:
        applied: updates since the run began.
        due: per thread, one trainer's after the other's; None before the first lookup.
        threads: H, number per trainer.
    """

    applied: int
    due: tuple[Due | None, ...]
    threads: int = 1

    @property
    @override
    def version(self) -> Version:
        return Version(self.applied)

    @override
    def version_at(self, step: int) -> Version:
        return Version(step * self._trainers)

    @override
    def on_question(self, question: Question) -> tuple[TableArrivals, tuple[Action, ...]]:
        answer = Answer((question,), is_kept=False)
        if isinstance(question, Prediction):
            return self, (answer,)
        thread, turn = self._turn(question)
        due = self.due[thread]
        if due is None or turn > due.end:
            return self._with(thread, Due(turn, turn + 1)), (answer,)
        if turn < due.begin:
            return self, ()  # a repeat, whose rows nobody waits for
        if turn < due.end:
            return self, (answer,)  # a repeat, after a rest or a lost answer
        return self._with(thread, Due(due.begin, turn + 1)), (answer,)

    @override
    def on_update(self, update: BatchOf) -> tuple[TableArrivals, tuple[Action, ...]]:
        thread, turn = self._turn(update)
        due = self.due[thread]
        if due is not None and turn < due.begin:
            return self, ()
        if due is None or turn >= due.end:
            looked_up = "none"
            if due is not None and due.begin < due.end:
                looked_up = str(due.begin * self.threads + thread % self.threads)
            raise DlrmError(
                f"update of batch {update.batch} by trainer {update.trainer}: too early, its rows "
                f"were not looked up; the batch that is due: {looked_up}"
            )
        after = replace(self._with(thread, Due(turn + 1, due.end)), applied=self.applied + 1)
        return after, (Apply((update,), self.applied // self._trainers),)

    @property
    def _trainers(self) -> int:
        return len(self.due) // self.threads

    def _turn(self, of: BatchOf) -> tuple[int, int]:
        """The thread of a batch, and its turn: the number of batches it had before."""
        turn, thread = divmod(of.batch, self.threads)
        return of.trainer * self.threads + thread, turn

    def _with(self, thread: int, due: Due) -> TableArrivals:
        return replace(self, due=(*self.due[:thread], due, *self.due[thread + 1 :]))


@final
@dataclass(frozen=True, slots=True)
class ArrivalOrder(TableOrder):
    """Order of arrival; as many updates as there are trainers are a step of the schedule.

    Attributes:
        threads: number per trainer.
    """

    threads: int = 1

    @override
    def begin(self, trainers: int, version: Version) -> TableArrivals:
        return TableArrivals(version, (None,) * (trainers * self.threads), self.threads)
