"""In which order a table server answers lookups and applies updates; pure, without tensors.

An order owns its machine: a state that takes one message at a time and says what to do now. To add
one: a file with such a class.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dlrm_hybrid.types import BatchNumber, Version


class BatchOf(NamedTuple):
    """A batch of one trainer, whose rows are asked for or whose updates have come."""

    trainer: int
    batch: BatchNumber


class Prediction(NamedTuple):
    """Rows that a trainer asks for to predict with, of a version at least.

    In order of arrival the number is no version of the tables, and nothing waits for it.
    """

    trainer: int
    version: Version


Question = BatchOf | Prediction


@dataclass(frozen=True, slots=True)
class Answer:
    """Look up these rows now and send them.

    Attributes:
        questions: whose rows.
        is_kept: whether `Resend` may ask for the same answer.
    """

    questions: tuple[Question, ...]
    is_kept: bool = True


@dataclass(frozen=True, slots=True)
class Resend:
    """Send the rows again that were sent for this batch: the tables have moved on since."""

    of: BatchOf


@dataclass(frozen=True, slots=True)
class Apply:
    """Update the tables once by the sum of these updates, which makes the next version.

    Attributes:
        updates: in the order in which they are summed.
        step: the learning rate is that of this step of the schedule.
    """

    updates: tuple[BatchOf, ...]
    step: int


Action = Answer | Resend | Apply


class TableState(Protocol):
    """What a table server knows of the trainers' messages; immutable."""

    @property
    def version(self) -> Version:
        """The newest that has been made."""
        ...

    def version_at(self, step: int) -> Version:
        """The version that a checkpoint of this step holds."""
        ...

    def on_question(self, question: Question) -> tuple[TableState, tuple[Action, ...]]:
        """The state after a question, and what to do now.

        Raises:
            DlrmError: the question is not due; names trainer and batch.
        """
        ...

    def on_update(self, update: BatchOf) -> tuple[TableState, tuple[Action, ...]]:
        """The state after an update, and what to do now, in this order: at most one `Apply`.

        Raises:
            DlrmError: the update is not due; names trainer and batch.
        """
        ...


class TableOrder(Protocol):
    """Which version of the tables answers a lookup, and when the next one is made."""

    def begin(self, trainers: int, version: Version) -> TableState:
        """The state of tables of this version, with nothing under way."""
        ...
