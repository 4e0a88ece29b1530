"""The two ends of an exchange of distinct rows, between a holder of tables and one trainer.

    holder                                      trainer
    rows          ──── a message ────▶          rows, as this trainer has them
    gradients     ◀──── a message ────          gradients, rounded for all its holders together

A format makes the ends; what their messages hold is theirs alone. Messages of a kind are read in
the order in which they were made. A trainer numbers its holders: their places. What it holds itself
it rounds as if that had travelled, so results do not depend on who holds a table.

Shapes: K rows of a message; L tables, P holders; D width of the widest table (see `Widths`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from numpy.typing import NDArray

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.wire.section import Dtype

if TYPE_CHECKING:
    from torch import Tensor

Message = bytes | memoryview
Numbers = NDArray[Any]
"""Rows or gradients (K, D) as they travel: float32 values, or int32 levels."""
Read = tuple[Numbers, int]
"""Rows that a trainer has read, but not taken yet, and the exponent of their step, or 0."""


class Held(NamedTuple):
    """Tables of one holder: numbers that name their state, rows that it holds, and widths."""

    tables: tuple[int, ...]
    rows_L: tuple[int, ...]
    widths: Widths


class Remembered(Protocol):
    """What is remembered of exchanged rows and gradients; by default nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint must hold."""
        return {}

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Resume from the `tensors` of a trainer in a checkpoint, if that holds them."""

    def counts(self) -> Mapping[str, tuple[int, int]]:
        """Per counter: (total, sent or lost) since the last call."""
        return {}


class HolderEnd(Remembered, Protocol):
    """A holder's end, for one trainer, and the type of the elements of messages."""

    dtype: Dtype
    exponent: int = 0
    """Exponent of the step for rows that are asked for now; 0 without steps."""

    def rows(self, rows: Rows, values_KD: Float32s, exponent: int) -> bytes:
        """Encode rows, with the exponent of when they were asked for."""
        ...

    def sent(self, rows: Rows, read: Read) -> None:
        """Resume after rows that a trainer had read in a checkpoint, but not taken."""

    def gradients(self, rows: Rows, message: Message) -> Float32s:
        """Decode gradients; raises SectionError if the message holds no such."""
        ...


class TrainerEnd(Remembered, Protocol):
    """A trainer's end, for all its holders, and the type of the elements of messages."""

    dtype: Dtype

    def size(self, place: int, rows: Rows) -> int | None:
        """Bytes of some rows, or of their gradients; None if that varies."""

    def read(self, place: int, rows: Rows, message: Message) -> Read:
        """Decode rows; raises SectionError if the message holds no such."""
        ...

    def take(self, place: int, rows: Rows, read: Read) -> Float32s:
        """Take rows that were read; returns them as this trainer has them from now on."""
        return read[0]

    def own_rows(self, place: int, rows: Rows, values_KD: Float32s) -> Float32s:
        """Round rows that the trainer holds itself, as `take` would return them."""
        ...

    def round(self, rows: Sequence[Rows], sums: Sequence[Float32s]) -> Sequence[Numbers]:
        """Round the sums of gradients (K, D) for each holder's rows; may raise DivergedError."""
        return sums

    def encode(self, place: int, rows: Rows, rounded_KD: Numbers) -> bytes:
        """Encode rounded gradients for a holder."""
        ...

    def values(self, rounded_KD: Numbers) -> Float32s:
        """Rounded gradients as a holder would decode them."""
        ...


class RowFormat(Protocol):
    """A form in which rows and gradients travel."""

    def trainer(self, trainer: int, held_P: Sequence[Held]) -> TrainerEnd:
        """Make the end of the trainer with this number."""
        ...

    def holder(self, trainer: int, held: Held) -> HolderEnd:
        """Make a holder's end for a trainer."""
        ...


class RowFormats(NamedTuple):
    """The formats of rows and gradients in training, and of rows in evaluations."""

    training: RowFormat
    exact: RowFormat
