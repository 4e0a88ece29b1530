"""Rows and gradients that travel as floats: whole, or cast to half the width.

Shapes: K rows of a message, P holders, D width of the widest table (see `Widths`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.bounds import WirePrecision
from dlrm_hybrid.compress.embedding.ends import (
    Held,
    HolderEnd,
    Message,
    Numbers,
    Read,
    RowFormat,
    RowFormats,
    TrainerEnd,
)
from dlrm_hybrid.compress.embedding.memory import LevelOptions, Rows
from dlrm_hybrid.compress.embedding.trainer import LevelFormat
from dlrm_hybrid.model.sharding import Cast, casts
from dlrm_hybrid.wire.section import Dtype, Encoding, SectionError

_DTYPES: Mapping[torch.dtype, Dtype] = {
    torch.float32: Dtype.FLOAT32,
    torch.float16: Dtype.FLOAT16,
    torch.bfloat16: Dtype.BFLOAT16,
}


def row_formats(
    precision: WirePrecision, table_rows: Sequence[int], levels: LevelOptions | None = None
) -> RowFormats:
    """Floats, or in training levels where their resolution is given."""
    floats = Floats(precision)
    return RowFormats(LevelFormat(levels, tuple(table_rows)) if levels else floats, floats)


@final
class Floats(RowFormat, HolderEnd, TrainerEnd):
    """Floats of one precision; also either end, of a trainer's holders or of the one holder."""

    def __init__(self, precision: WirePrecision, held_P: Sequence[Held] = ()) -> None:
        self._precision: WirePrecision = precision
        self._row_cast, self._gradient_cast = casts(precision)
        self._widths_P = [held.widths for held in held_P]
        self.dtype = _DTYPES[self._row_cast.dtype]

    @override
    def trainer(self, trainer: int, held_P: Sequence[Held]) -> TrainerEnd:
        return Floats(self._precision, held_P)

    @override
    def holder(self, trainer: int, held: Held) -> HolderEnd:
        return Floats(self._precision, [held])

    @override
    def size(self, place: int, rows: Rows) -> int:
        elements = self._widths_P[place].elements(rows.counts_L)
        return elements * self._row_cast.dtype.itemsize

    @override
    def rows(self, rows: Rows, values_KD: Float32s, exponent: int) -> bytes:
        return self._encoded(0, rows, values_KD, self._row_cast)

    @override
    def gradients(self, rows: Rows, message: Message) -> Float32s:
        return self._decoded(0, rows, message, self._gradient_cast)

    @override
    def read(self, place: int, rows: Rows, message: Message) -> Read:
        return self._decoded(place, rows, message, self._row_cast), 0

    @override
    def own_rows(self, place: int, rows: Rows, values_KD: Float32s) -> Float32s:
        return self._row_cast.rounded(torch.from_numpy(values_KD)).numpy()

    @override
    def encode(self, place: int, rows: Rows, rounded_KD: Numbers) -> bytes:
        return self._encoded(place, rows, rounded_KD, self._gradient_cast)

    @override
    def values(self, rounded_KD: Numbers) -> Float32s:
        return self._gradient_cast.rounded(torch.from_numpy(rounded_KD)).numpy()

    def _encoded(self, place: int, rows: Rows, values_KD: Float32s, cast: Cast) -> bytes:
        packed = self._widths_P[place].packed(torch.from_numpy(values_KD), rows.counts_L)
        return cast.encode(packed).contiguous().view(-1).view(torch.uint8).numpy().tobytes()

    def _decoded(self, place: int, rows: Rows, message: Message, cast: Cast) -> Float32s:
        if len(message) != (size := self.size(place, rows)):
            fault = f"{len(message)} bytes, where {len(rows.ids_K)} rows take {size}"
            raise SectionError(2, Encoding.DENSE, fault)
        numbers = torch.empty(size // cast.dtype.itemsize, dtype=cast.dtype)
        numbers.view(torch.uint8).numpy()[:] = np.frombuffer(message, np.uint8)
        return self._widths_P[place].unpacked(cast.decode(numbers), rows.counts_L).numpy()
