"""Which version of the tables a table server answers with, and when it makes the next; no tensors.

Version n + 1 is made of the updates of batch n from all trainers, summed in trainer order. Rows of
batch n are those of version max(first, n - staleness). So results do not depend on when messages
come, and a message that comes twice changes nothing.

A trainer asks for the rows of batch n + staleness before it sends its update of batch n: what a
version is needed for has been asked for when the next one is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, final

from dlrm_hybrid.types import BatchNumber, DlrmError, Version


class BatchOf(NamedTuple):
    """A batch of one trainer, whose rows are asked for or whose updates have come."""

    trainer: int
    batch: BatchNumber


class Prediction(NamedTuple):
    """Rows that a trainer asks for to predict with, of a version at least."""

    trainer: int
    version: Version


Question = BatchOf | Prediction


@dataclass(frozen=True, slots=True)
class Answer:
    """Look up these rows now and send them."""

    questions: tuple[Question, ...]


@dataclass(frozen=True, slots=True)
class Resend:
    """Send the rows again that were sent for this batch: the tables have moved on since."""

    of: BatchOf


@dataclass(frozen=True, slots=True)
class Apply:
    """Update the tables by what all trainers have sent for this batch."""

    batch: BatchNumber


Action = Answer | Resend | Apply


@final
@dataclass(frozen=True, slots=True)
class TableVersions:
    """What a table server knows of the trainers' messages; immutable.

    Attributes:
        staleness: how many batches a lookup may be ahead of the updates it sees.
        first: the version this attempt began with.
        updated: updates that have come from each trainer, those of earlier attempts included.
        waiting: questions whose version is not made yet, as they came.
        answered: batches whose rows were sent, but whose updates have not come.
    """

    staleness: int
    first: Version
    updated: tuple[int, ...]
    waiting: tuple[Question, ...] = ()
    answered: frozenset[BatchOf] = frozenset()

    @staticmethod
    def begin(trainers: int, staleness: int, first: Version) -> TableVersions:
        """As after so many batches of each trainer, with nothing under way."""
        return TableVersions(staleness, first, (first,) * trainers)

    @property
    def version(self) -> Version:
        """The newest that has been made."""
        return Version(min(self.updated))

    def needs(self, question: Question) -> Version:
        """The version that a question is answered with; for a prediction the oldest."""
        if isinstance(question, Prediction):
            return question.version
        return Version(max(self.first, question.batch - self.staleness))

    def on_question(self, question: Question) -> tuple[TableVersions, tuple[Action, ...]]:
        """The state after a question, and what to do now.

        Raises:
            DlrmError: a lookup is too far ahead or too late; names trainer and batch.
        """
        if isinstance(question, BatchOf):
            done = self.updated[question.trainer]
            if question.batch < done:
                return self, ()  # it comes again, and nobody waits for the rows any more
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

    def on_update(self, update: BatchOf) -> tuple[TableVersions, tuple[Action, ...]]:
        """The state after an update, and what to do now, in this order.

        Raises:
            DlrmError: the update is not due; names trainer and batch.
        """
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
        applied = Apply(BatchNumber(self.version))
        return after, (applied, Answer(ready)) if ready else (applied,)

    def _answering(self, questions: tuple[Question, ...]) -> TableVersions:
        lookups = {one for one in questions if isinstance(one, BatchOf)}
        return replace(self, answered=self.answered | lookups)
