"""Levels of rows as bytes: one sender and one receiver for each direction between two ends.

    i8: exponents of steps │ tables, see `wire.frequencies` │ flags and levels

Rows name the step that they are in; gradients theirs, and that in which rows are to be sent next.

Shapes: K rows, L tables, D width of the widest (see `Widths`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from dlrm_hybrid.arrays import Int32s, Int64s
from dlrm_hybrid.compress.embedding.memory import MOST_EXPONENT
from dlrm_hybrid.compress.embedding.widths import Widths
from dlrm_hybrid.kernels.levels.rans import (
    EVENT_BYTES,
    EVENTS_OF_A_LEVEL,
    STATE_BYTES,
    SYMBOLS,
)
from dlrm_hybrid.kernels.levels.row_levels import count_levels, decode_levels, encode_levels
from dlrm_hybrid.wire.frequencies import Shape, TableReceiver, TableSender
from dlrm_hybrid.wire.section import Dtype, Encoding, Section


@final
class LevelSender:
    """Codes levels, by chances of its own for each table."""

    def __init__(self, widths: Widths, lifespan: int) -> None:
        self._dims_L, tables = widths.as_array, len(widths.dims)
        self._tables = TableSender(Shape(tables, tables, SYMBOLS), lifespan)

    def encode(self, levels_KD: Int32s, counts_L: Int64s, exponents: Sequence[int]) -> bytes:
        """The bytes of a message."""
        counts = self._tables.counts
        counted = (counts.set_C, counts.flags_C, counts.symbols_CS)
        rows = count_levels(levels_KD, counts_L, self._dims_L, *counted)
        head = np.array(exponents, np.int8).tobytes() + self._tables.begin()
        events = len(levels_KD) + EVENTS_OF_A_LEVEL * rows * levels_KD.shape[1]
        events_S = np.empty(events, np.uint32)
        out = np.empty(EVENT_BYTES * events + STATE_BYTES, np.uint8)
        tables = self._tables.tables
        chances = (tables.chance_C, tables.starts_CE)
        size = encode_levels(levels_KD, counts_L, self._dims_L, *chances, events_S, out)
        return head + out[:size].tobytes()

    def restart(self) -> None:
        """Send tables with the next message: who receives it may have none."""
        self._tables.restart()


@final
class LevelReceiver:
    """Reads what a `LevelSender` has coded."""

    def __init__(self, widths: Widths, exponents: int) -> None:
        self._widths, tables = widths, len(widths.dims)
        self._exponents = exponents
        self._tables = TableReceiver(Shape(tables, tables, SYMBOLS))

    def decode(self, message: memoryview, counts_L: Int64s) -> tuple[Int32s, list[int]]:
        """The levels (K, D) of a message, and its exponents.

        Raises:
            SectionError: it holds no such levels.
        """
        head, message = message[: self._exponents], message[self._exponents :]
        section = Section(0, Encoding.DENSE, Dtype.UINT8, len(message), message)
        exponents = np.frombuffer(head, np.int8).tolist()
        if len(exponents) < self._exponents or any(abs(x) > MOST_EXPONENT for x in exponents):
            raise section.error(f"it does not begin with {self._exponents} exponents of steps")
        tables, _, codes = self._tables.begin(section)
        levels_KD = np.empty((int(counts_L.sum()), self._widths.widest), np.int32)
        data = np.frombuffer(codes, np.uint8).copy()
        chances, dims_L = (tables.chance_C, tables.starts_CE), self._widths.as_array
        if not decode_levels(data, counts_L, dims_L, *chances, levels_KD):
            raise section.error(f"{len(data)} bytes are not the levels of {len(levels_KD)} rows")
        return levels_KD, exponents
