"""Checksums of shards: one over the whole file, one for each block of its rows.

Shapes: R rows, W = 40 words of a record, F = 26 categorical features.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.data.format import BLOCK_ROWS, FIRST_DENSE_WORD, FIRST_ID_WORD
from dlrm_hybrid.data.manifest import Shard

Words = npt.NDArray[np.uint32]
_ONE = np.float32(1).view(np.uint32)


class ShardChecksums:
    """Adds up the checksums of a shard while its rows are written."""

    def __init__(self) -> None:
        self._file = xxhash.xxh3_128()
        self._block = xxhash.xxh3_64()
        self._blocks: list[str] = []
        self._rows = 0

    def update(self, records_RW: Words) -> None:
        """The next rows of the shard; the array is contiguous."""
        self._file.update(records_RW.data)
        while len(records_RW):
            head_RW = records_RW[: BLOCK_ROWS - self._rows % BLOCK_ROWS]
            self._block.update(head_RW.data)
            self._rows += len(head_RW)
            records_RW = records_RW[len(head_RW) :]
            if self._rows % BLOCK_ROWS == 0:
                self._end_block()

    def shard(self, file: str, clicks: int) -> Shard:
        """What the manifest says of the shard; call it once, after the last rows."""
        if self._rows % BLOCK_ROWS:
            self._end_block()
        return Shard(
            file=file,
            rows=self._rows,
            clicks=clicks,
            xxh3=self._file.hexdigest(),
            blocks=tuple(self._blocks),
        )

    def _end_block(self) -> None:
        self._blocks.append(self._block.hexdigest())
        self._block.reset()


def block_xxh3(records_RW: Words) -> str:
    """The checksum of one block."""
    return xxhash.xxh3_64_hexdigest(records_RW.data)


def fault(records_RW: Words, table_rows: Sequence[int]) -> tuple[int, str] | None:
    """The first row that no model can be trained on, and why; None if all are fine.

    Args:
        records_RW: uint32, rows of a shard.
        table_rows: of each embedding table.
    """
    label_R = records_RW[:, 0]
    dense_RI = records_RW[:, FIRST_DENSE_WORD:FIRST_ID_WORD].view(np.float32)
    wrong_RW = np.zeros(records_RW.shape, np.bool_)
    wrong_RW[:, 0] = (label_R != 0) & (label_R != _ONE)
    wrong_RW[:, FIRST_DENSE_WORD:FIRST_ID_WORD] = ~np.isfinite(dense_RI)
    ids_RF = records_RW[:, FIRST_ID_WORD:]
    wrong_RW[:, FIRST_ID_WORD:] = ids_RF >= np.array(table_rows, np.uint32)
    places = np.argwhere(wrong_RW)
    if not len(places):
        return None
    row, word = (int(index) for index in places[0])
    value = records_RW[row, word]
    if word == 0:
        return row, f"label {value.view(np.float32):g} is neither 0 nor 1"
    if word < FIRST_ID_WORD:
        return row, f"I{word} is {value.view(np.float32):g}"
    column = word - FIRST_ID_WORD
    return row, f"C{column + 1} is {value}, its table has {table_rows[column]} rows"
