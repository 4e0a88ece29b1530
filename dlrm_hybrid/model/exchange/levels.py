"""Exchange of rows and gradients of shared tables as integer levels.

What a trainer looks up in its own tables is rounded too, though it is not sent: so results do not
depend on who holds a table.

Shapes: D width of the widest table (see `Widths`), K distinct ids, T trainers, L tables held here.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.comm.group import CountedGroup, GroupMessages, split
from dlrm_hybrid.compress.embedding.memory import Copies, LevelOptions, Rows, values_of
from dlrm_hybrid.compress.embedding.messages import LevelReceiver, LevelSender
from dlrm_hybrid.compress.embedding.trainer import (
    Part,
    TrainerMemory,
    load_copies,
    tensors_of,
    values_of_trainer,
)
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import SectionError

Array = NDArray[np.generic]

ROW_EXPONENTS, GRADIENT_EXPONENTS = 1, 2
_MARGIN = 6  # for `GroupMessages`: nine of ten messages have room


@final
class RowResponder:
    """A table holder's side of the exchange with one trainer that looks up.

    Args:
        copies: the rows as the trainer has them.
        exponent: exponent of the step of rows.
        lifespan: number of messages that a probability table serves.
    """

    def __init__(
        self, tables: Sequence[int], widths: Widths, copies: Copies, exponent: int, lifespan: int
    ) -> None:
        self.tables = tuple(tables)
        self.copies = copies
        self.exponent = exponent
        self.sender = LevelSender(widths, lifespan)
        self.receiver = LevelReceiver(widths, GRADIENT_EXPONENTS)

    def rows(self, rows: Rows, values_KD: Float32s) -> bytes:
        """Encode the message with some rows; empty if no table is held here."""
        if not self.tables:
            return b""
        levels_KD, _, _ = self.copies.send(rows, values_KD, self.exponent)
        return self.sender.encode(levels_KD, rows.counts_L, [self.exponent])

    def gradients(self, message: memoryview, rows: Rows) -> Float32s:
        """Decode the gradients of some rows from the trainer's message."""
        if not self.tables:
            return np.empty((0, self.copies.values_SD.shape[1]), np.float32)
        levels_KD, exponents = self.receiver.decode(message, rows.counts_L)
        exponent, self.exponent = exponents
        return values_of(levels_KD, exponent)

    def load(self, values: Mapping[str, Array]) -> None:
        """Resume from the trainer's `TrainerMemory.tensors`."""
        self.exponent = load_copies(self.copies, self.tables, values)
        self.sender.restart()


@final
class Asking:
    """A trainer's side of the exchange with one holder of the tables it looks up."""

    def __init__(self, part: Part, lifespan: int) -> None:
        self.part = part
        self.sender = LevelSender(part.widths, lifespan)
        self.receiver = LevelReceiver(part.widths, ROW_EXPONENTS)

    def rows(self, message: memoryview, rows: Rows) -> Float32s:
        """Decode the rows of a holder's message."""
        if not self.part.tables:
            return np.empty((0, self.part.widths.widest), np.float32)
        levels_KD, (exponent,) = self.receiver.decode(message, rows.counts_L)
        view_KD, fresh = self.part.copies.receive(rows, levels_KD, exponent)
        self.part.take(rows, view_KD, fresh)
        return view_KD

    def gradients(self, levels_KD: Int32s, rows: Rows, exponents: Sequence[int]) -> bytes:
        """Encode the message with the gradients of some rows; empty if the holder has no table."""
        if not self.part.tables:
            return b""
        return self.sender.encode(levels_KD, rows.counts_L, exponents)


@final
class LevelExchange:
    """Exchanges rows and gradients as levels between trainers with table-wise sharding.

    Args:
        held_T: tables that each trainer holds, in the order of lookups.
        options: resolution of rows and gradients on the wire.
    """

    def __init__(
        self,
        held_T: Sequence[Sequence[int]],
        spec: ModelShape,
        options: LevelOptions,
        group: CountedGroup,
    ) -> None:
        self._rank = group.rank()
        self._row_messages = GroupMessages(group, _MARGIN)
        self._gradient_messages = GroupMessages(group, _MARGIN)
        rows, widths, most = spec.table_rows, spec.widths, options.copies_rows
        parts = [Part(held, [rows[t] for t in held], widths.of(held), most) for held in held_T]
        self.memory = TrainerMemory(parts, rows, options)
        self._asking_T = [Asking(part, options.lifespan) for part in parts]
        tables = held_T[self._rank]
        rows_L, widest = [rows[table] for table in tables], widths.widest
        exponent = self.memory.row_step.exponent
        # For its own rows a trainer is both ends.
        copies_T = [
            parts[self._rank].copies if trainer == self._rank else Copies(rows_L, widest, most)
            for trainer in range(len(held_T))
        ]
        self._answering_T = [
            RowResponder(tables, widths.of(tables), copies, exponent, options.lifespan)
            for copies in copies_T
        ]

    def rows(
        self, rows_KD: Tensor, theirs_T: Sequence[Rows], mine_T: Sequence[Rows], dense_bytes: int
    ) -> Tensor:
        """Send the rows that were asked for; returns the rows that this trainer asked for.

        Args:
            rows_KD: exact rows, for one trainer after the other.
            theirs_T: ids that each trainer asked for.
            mine_T: ids that were asked of each trainer.
            dense_bytes: size of what is sent, uncompressed.
        """
        parts_T = _parts(rows_KD, theirs_T)
        messages_T = [
            b"" if trainer == self._rank else answering.rows(rows, values_KD)
            for trainer, (answering, rows, values_KD) in enumerate(
                zip(self._answering_T, theirs_T, parts_T, strict=True)
            )
        ]
        received_T = self._row_messages.exchange(messages_T, dense_bytes)
        views: list[Float32s] = []
        for trainer, (asking, rows) in enumerate(zip(self._asking_T, mine_T, strict=True)):
            if trainer == self._rank:
                views.append(self.memory.own_rows(trainer, rows, parts_T[trainer]))
                continue
            with _named(f"rows of trainer {trainer}"):
                views.append(asking.rows(received_T[trainer], rows))
        return torch.from_numpy(np.concatenate(views))

    def gradients(
        self, sum_KD: Tensor, theirs_T: Sequence[Rows], mine_T: Sequence[Rows], dense_bytes: int
    ) -> Tensor:
        """Send gradients of the rows that this trainer asked for; returns gradients of its rows.

        Args:
            sum_KD: sums for distinct ids, for one holder after the other.
        """
        levels_T = self.memory.round(mine_T, _parts(sum_KD, mine_T))
        exponents = [self.memory.gradient_step.exponent, self.memory.row_step.exponent]
        messages_T = [
            b"" if trainer == self._rank else asking.gradients(levels_KD, rows, exponents)
            for trainer, (asking, rows, levels_KD) in enumerate(
                zip(self._asking_T, mine_T, levels_T, strict=True)
            )
        ]
        received_T = self._gradient_messages.exchange(messages_T, dense_bytes)
        gradients: list[Float32s] = []
        for trainer, (end, rows) in enumerate(zip(self._answering_T, theirs_T, strict=True)):
            if trainer == self._rank:
                gradients.append(values_of(levels_T[trainer], exponents[0]))
                continue
            with _named(f"gradients of trainer {trainer}"):
                gradients.append(end.gradients(received_T[trainer], rows))
        return torch.from_numpy(np.concatenate(gradients))

    def tensors(self) -> dict[str, Tensor]:
        """The state of this trainer that a checkpoint must hold."""
        return tensors_of(self._rank, self.memory)

    def counts(self) -> dict[str, tuple[int, int]]:
        """Counters since the last call; see `TrainerMemory.counts`."""
        return self.memory.counts()

    def load(self, values: Mapping[str, Tensor]) -> None:
        """Resume from the `tensors` of all trainers, as far as `values` hold them."""
        for trainer, end in enumerate(self._answering_T):
            state = values_of_trainer(trainer, values)
            if state and trainer == self._rank:
                self.memory.load(state)
            elif state:
                end.load(state)
        for asking in self._asking_T:
            asking.sender.restart()


def _parts(values_KD: Tensor, rows_T: Sequence[Rows]) -> list[Float32s]:
    """Split values into the values for the rows of each end."""
    parts = split(values_KD.contiguous(), [len(rows.ids_K) for rows in rows_T])
    return [part.numpy() for part in parts]


@contextmanager
def _named(label: str) -> Generator[None, None, None]:
    try:
        yield
    except SectionError as error:
        raise DlrmError(f"{label}: {error}") from error
