"""Table orders as protocols: when a table server answers lookups and applies updates; no tensors.

An order owns a state machine that maps each message to actions. To add
one: a file with such a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dlrm_hybrid.types import BatchNumber, Version


class BatchOf(NamedTuple):
    """A batch of one trainer, to look up or to update."""

    trainer: int
    batch: BatchNumber


class Prediction(NamedTuple):
    """A question: rows of at least a version, for a prediction by a trainer.

    In order of arrival the number is not a version, and nothing waits for it.
    """

    trainer: int
    version: Version


Question = BatchOf | Prediction


@dataclass(frozen=True, slots=True)
class Answer:
    """Action: look up the rows of these questions now and send them.

    Attributes:
        questions: those to answer.
        is_kept: whether `Resend` may ask for the same answer.
    """

    questions: tuple[Question, ...]
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class Resend:
    """Action: send a batch's rows again as they were sent; the tables have changed since."""

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


Action = Answer | Resend | Apply


class TableState(Protocol):
    """A table server's immutable state of the trainers' messages."""

    @property
    def version(self) -> Version:
        """The newest version that has been made."""
        ...

    def version_at(self, step: int) -> Version:
        """The version that a checkpoint of this step holds."""
        ...

    def on_question(self, question: Question) -> tuple[TableState, tuple[Action, ...]]:
        """The state after a question, and the actions to take.

        Raises:
            DlrmError: the question is not due; names trainer and batch.
        """
        ...

    def on_update(self, update: BatchOf) -> tuple[TableState, tuple[Action, ...]]:
        """The state after an update, and the actions to take in order: at most one `Apply`.

        Raises:
            DlrmError: the update is not due; names trainer and batch.
        """
        ...


class TableOrder(Protocol):
    """Decides which version of the tables answers a lookup, and when the next one is made."""

    def begin(self, trainers: int, version: Version) -> TableState:
        """The initial state of tables at this version, with nothing under way."""
        ...
