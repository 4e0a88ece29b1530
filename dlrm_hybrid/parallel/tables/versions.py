"""Table order by version: which one answers a lookup, and when the next is made; no tensors.

Version n + 1 is made of the updates of batch n from all trainers, summed in trainer order. Rows of
batch n are those of version max(first, n - staleness). So results do not depend on when messages
come, and a message that comes twice changes nothing.

A trainer asks for the rows of batch n + staleness before it sends its update of batch n, so every
lookup that needs a version is known when the next one is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from dlrm_hybrid.parallel.tables.order import (
    Action,
    Answer,
    Apply,
    BatchOf,
    Prediction,
    Question,
    Resend,
    TableOrder,
    TableState,
)
from dlrm_hybrid.types import BatchNumber, DlrmError, Version


@final
@dataclass(frozen=True, slots=True)
class TableVersions(TableState):
    """A table server's immutable state of the trainers' messages.

    Attributes:
        staleness: how many batches a lookup may be ahead of the updates it sees.
        first: the version this attempt began with.
        updated: number of updates from each trainer, those of earlier attempts included.
        waiting: questions whose version is not made yet, in order of arrival.
        answered: batches whose rows were sent, but whose updates have not come.
    """

    staleness: int
    first: Version
    updated: tuple[int, ...]
    waiting: tuple[Question, ...] = ()
    answered: frozenset[BatchOf] = frozenset()

    @property
    @override
    def version(self) -> Version:
        return Version(min(self.updated))

    @override
    def version_at(self, step: int) -> Version:
        return Version(step)

    def needs(self, question: Question) -> Version:
        """The version that answers a question; for a prediction the oldest that may."""
        if isinstance(question, Prediction):
            return question.version
        return Version(max(self.first, question.batch - self.staleness))

    @override
    def on_question(self, question: Question) -> tuple[TableVersions, tuple[Action, ...]]:
        if isinstance(question, BatchOf):
            done = self.updated[question.trainer]
            if question.batch < done:
                return self, ()  # a repeat, whose rows nobody waits for
            if question.batch > done + self.staleness:
                raise DlrmError(
                    f"lookup of batch {question.batch} by trainer {question.trainer}: too early, "
                    f"its update of batch {done} is due and embedding.staleness = {self.staleness}"
                )
        needed = self.needs(question)
        if needed > self.version:
            if question in self.waiting:
                return self, ()
            return replace(self, waiting=(*self.waiting, question)), ()
        if isinstance(question, BatchOf) and needed < self.version:
            if question not in self.answered:
                raise DlrmError(
                    f"lookup of batch {question.batch} by trainer {question.trainer}: too late, it "
                    f"needs version {needed} of the tables; they are at {self.version}"
                )
            return self, (Resend(question),)
        return self._answering((question,)), (Answer((question,)),)

    @override
    def on_update(self, update: BatchOf) -> tuple[TableVersions, tuple[Action, ...]]:
        due = self.updated[update.trainer]
        if update.batch < due:
            return self, ()
        if update.batch > due or update.batch > self.version + self.staleness:
            raise DlrmError(
                f"update of batch {update.batch} by trainer {update.trainer}: too early, that of "
                f"batch {due} is due and the tables are at version {self.version}"
            )
        updated = tuple(n + (one == update.trainer) for one, n in enumerate(self.updated))
        after = replace(self, updated=updated, answered=self.answered - {update})
        if after.version == self.version:
            return after, ()
        ready = tuple(one for one in after.waiting if after.needs(one) <= after.version)
        waiting = tuple(one for one in after.waiting if one not in ready)
        after = replace(after, waiting=waiting)._answering(ready)
        number = self.version
        updates = tuple(BatchOf(one, BatchNumber(number)) for one in range(len(updated)))
        applied = Apply(updates, number)
        return after, (applied, Answer(ready)) if ready else (applied,)

    def _answering(self, questions: tuple[Question, ...]) -> TableVersions:
        lookups = {one for one in questions if isinstance(one, BatchOf)}
        return replace(self, answered=self.answered | lookups)


@final
@dataclass(frozen=True, slots=True)
class BatchOrder(TableOrder):
    """Order by batch: each version is made of one batch of every trainer.

    Attributes:
        staleness: how many batches a lookup may be ahead of the updates it sees.
    """

    staleness: int

    @override
    def begin(self, trainers: int, version: Version) -> TableVersions:
        return TableVersions(self.staleness, version, (version,) * trainers)
