"""Tables in order of arrival: lookups see the newest rows, every update is applied at once, alone.

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
    """Batches of a trainer that were looked up, but not updated: `begin` to `end - 1`."""

    begin: int
    end: int


@final
@dataclass(frozen=True, slots=True)
class TableArrivals(TableState):
    """What a table server knows of trainers that do not wait for each other; immutable.

    A trainer counts its own batches, and its first lookup says where it begins. So does one that
    leaves a gap: a trainer that was lost and has joined again.

    Attributes:
        applied: updates since the run began.
        due: of each trainer; None before its first lookup.
    """

    applied: int
    due: tuple[Due | None, ...]

    @property
    @override
    def version(self) -> Version:
        return Version(self.applied)

    @override
    def version_at(self, step: int) -> Version:
        return Version(step * len(self.due))

    @override
    def on_question(self, question: Question) -> tuple[TableArrivals, tuple[Action, ...]]:
        answer = Answer((question,), is_kept=False)
        if isinstance(question, Prediction):
            return self, (answer,)
        trainer, batch = question
        due = self.due[trainer]
        if due is None or batch > due.end:
            return self._with(trainer, Due(batch, batch + 1)), (answer,)
        if batch < due.begin:
            return self, ()  # it comes again, and nobody waits for the rows any more
        if batch < due.end:
            return self, (answer,)  # it comes again, after a rest or a lost answer
        return self._with(trainer, Due(due.begin, batch + 1)), (answer,)

    @override
    def on_update(self, update: BatchOf) -> tuple[TableArrivals, tuple[Action, ...]]:
        trainer, batch = update
        due = self.due[trainer]
        if due is not None and batch < due.begin:
            return self, ()
        if due is None or batch >= due.end:
            looked_up = "none" if due is None or due.begin == due.end else f"{due.begin}"
            raise DlrmError(
                f"update of batch {batch} by trainer {trainer}: too early, its rows were not "
                f"looked up; the batch that is due: {looked_up}"
            )
        after = replace(self._with(trainer, Due(batch + 1, due.end)), applied=self.applied + 1)
        return after, (Apply((update,), self.applied // len(self.due)),)

    def _with(self, trainer: int, due: Due) -> TableArrivals:
        return replace(self, due=(*self.due[:trainer], due, *self.due[trainer + 1 :]))


@final
@dataclass(frozen=True, slots=True)
class ArrivalOrder(TableOrder):
    """As messages come; the same number of updates of all trainers is a step of the schedule."""

    @override
    def begin(self, trainers: int, version: Version) -> TableArrivals:
        return TableArrivals(version, (None,) * trainers)
