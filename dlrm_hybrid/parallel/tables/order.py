"""Table orders: when a table server answers lookups and applies updates; no tensors.

An order is a state machine that maps each message to actions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol, Self, final

from typing_extensions import override

from dlrm_hybrid.types import BatchNumber, DlrmError, Version


class BatchOf(NamedTuple):
    """A batch of one trainer, to look up or to update."""

    trainer: int
    batch: BatchNumber


class PredictionOf(NamedTuple):
    """A question: rows of at least a version, for a prediction by a trainer.

    With `ArrivalOrder` the number is not a version, and nothing waits for it.
    """

    trainer: int
    version: Version


Question = BatchOf | PredictionOf


@dataclass(frozen=True, slots=True)
class SendRows:
    """Action: look up the rows of these questions now and send them.

    Attributes:
        questions: the questions to answer.
        is_kept: whether `Resend` may ask for the same answer.
    """

    questions: tuple[Question, ...]
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class Resend:
    """Action: send a batch's rows again as they were sent; tables may have changed since."""

    of: BatchOf


@dataclass(frozen=True, slots=True)
class Apply:
    """Action: update the tables by the sum of these updates, which makes the next version.

    Attributes:
        updates: in the order in which they are summed.
        step: step of the schedule whose learning rate applies.
    """

    updates: tuple[BatchOf, ...]
    step: int


TableAction = SendRows | Resend | Apply


class TableOrder(Protocol):
    """Decides which version of the tables answers a lookup, and when the next one is made.

    It is a table server's immutable state of the trainers' messages.
    """

    def begin(self, trainers: int, version: Version) -> Self:
        """The initial state of tables at this version, with nothing under way."""
        ...

    @property
    def version(self) -> Version:
        """The newest version that has been made."""
        ...

    def version_at(self, step: int) -> Version:
        """The version that a checkpoint of this step holds."""
        ...

    def on_question(self, question: Question) -> tuple[Self, tuple[TableAction, ...]]:
        """The state after a question, and the actions to take.

        Raises:
            DlrmError: the question is not due; names trainer and batch.
        """
        ...

    def on_update(self, update: BatchOf) -> tuple[Self, tuple[TableAction, ...]]:
        """The state after an update, and the actions to take in order: at most one `Apply`.

        Raises:
            DlrmError: the update is not due; names trainer and batch.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class BatchOrder(TableOrder):
    """Order by batch: each version is made of one batch of every trainer.

    Version n + 1 is made of the updates of batch n from all trainers, summed in trainer order. Rows
    of batch n are those of version max(first, n - staleness). So results do not depend on when
    messages come, and a message that comes twice changes nothing.

    A trainer asks for the rows of batch n + staleness before it sends its update of batch n, so
    every lookup that needs a version is known when the next one is made.

    Attributes:
        staleness: how many batches a lookup may be ahead of the updates it sees.
        first: the version this attempt began with.
        updated: number of updates from each trainer, those of earlier attempts included.
        waiting: questions whose version is not made yet, in order of arrival.
        answered: batches whose rows were sent, but whose updates have not come.
    """

    staleness: int
    first: Version = Version(0)
    updated: tuple[int, ...] = ()
    waiting: tuple[Question, ...] = ()
    answered: frozenset[BatchOf] = frozenset()

    @override
    def begin(self, trainers: int, version: Version) -> Self:
        return replace(
            self,
            first=version,
            updated=(version,) * trainers,
            waiting=(),
            answered=frozenset(),
        )

    @property
    @override
    def version(self) -> Version:
        return Version(min(self.updated))

    @override
    def version_at(self, step: int) -> Version:
        return Version(step)

    def needs(self, question: Question) -> Version:
        """The version that answers a question; for a prediction the oldest that may."""
        if isinstance(question, PredictionOf):
            return question.version
        return Version(max(self.first, question.batch - self.staleness))

    @override
    def on_question(self, question: Question) -> tuple[Self, tuple[TableAction, ...]]:
        if isinstance(question, BatchOf):
            done = self.updated[question.trainer]
            if question.batch < done:
                return self, ()  # a repeat, whose rows nobody waits for
            if question.batch > done + self.staleness:
                raise DlrmError(
                    f"lookup of batch {question.batch} by trainer {question.trainer}: too early, "
                    f"its update of batch {done} is due and embedding.staleness = {self.staleness}"
                )
            if question in self.answered:
                return self, (Resend(question),)
        needed = self.needs(question)
        if needed > self.version:
            if question in self.waiting:
                return self, ()
            return replace(self, waiting=(*self.waiting, question)), ()
        if isinstance(question, BatchOf) and needed < self.version:
            raise DlrmError(
                f"lookup of batch {question.batch} by trainer {question.trainer}: too late, it "
                f"needs version {needed} of the tables; they are at {self.version}"
            )
        return self._answering((question,)), (SendRows((question,)),)

    @override
    def on_update(self, update: BatchOf) -> tuple[Self, tuple[TableAction, ...]]:
        due = self.updated[update.trainer]
        if update.batch < due:
            return self, ()
        if update.batch > due or update.batch > self.version + self.staleness:
            raise DlrmError(
                f"update of batch {update.batch} by trainer {update.trainer}: too early, that of "
                f"batch {due} is due and the tables are at version {self.version}"
            )
        updated = tuple(n + (trainer == update.trainer) for trainer, n in enumerate(self.updated))
        after = replace(self, updated=updated, answered=self.answered - {update})
        if after.version == self.version:
            return after, ()
        ready = tuple(x for x in after.waiting if after.needs(x) <= after.version)
        waiting = tuple(x for x in after.waiting if x not in ready)
        after = replace(after, waiting=waiting)._answering(ready)
        number = self.version
        updates = tuple(BatchOf(trainer, BatchNumber(number)) for trainer in range(len(updated)))
        applied = Apply(updates, number)
        return after, (applied, SendRows(ready)) if ready else (applied,)

    def _answering(self, questions: tuple[Question, ...]) -> Self:
        lookups = {question for question in questions if isinstance(question, BatchOf)}
        return replace(self, answered=self.answered | lookups)


class Due(NamedTuple):
    """A thread's turns that were looked up, but not updated: `begin` to `end - 1`."""

    begin: int
    end: int


@final
@dataclass(frozen=True, slots=True)
class ArrivalOrder(TableOrder):
    """Order of arrival, where trainers do not wait for each other.

    Lookups see the newest rows, and each update is applied at once. The version is the number of
    updates applied since the run began; as many as there are trainers are a step of the schedule.
    So results depend on the order in which messages come, and on nothing else.

    A trainer counts its own batches, of which each of its threads has every H-th, and is in order
    by itself. The first lookup of a thread says where it begins, as does a lookup that leaves a
    gap: its trainer was lost and has rejoined.

    Attributes:
        threads: H, number per trainer.
        applied: updates since the run began.
        due: turns per thread, trainer after trainer; None before the first lookup.
    """

    threads: int = 1
    applied: int = 0
    due: tuple[Due | None, ...] = ()

    @override
    def begin(self, trainers: int, version: Version) -> Self:
        return replace(self, applied=version, due=(None,) * (trainers * self.threads))

    @property
    @override
    def version(self) -> Version:
        return Version(self.applied)

    @override
    def version_at(self, step: int) -> Version:
        return Version(step * self._trainers)

    @override
    def on_question(self, question: Question) -> tuple[Self, tuple[TableAction, ...]]:
        answer = SendRows((question,), is_kept=False)
        if isinstance(question, PredictionOf):
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
    def on_update(self, update: BatchOf) -> tuple[Self, tuple[TableAction, ...]]:
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
        """The thread of a batch, and its turn: the number of batches that the thread had before."""
        turn, thread = divmod(of.batch, self.threads)
        return of.trainer * self.threads + thread, turn

    def _with(self, thread: int, due: Due) -> Self:
        return replace(self, due=(*self.due[:thread], due, *self.due[thread + 1 :]))
