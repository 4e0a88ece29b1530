"""The formats of a row: raw text, spilled columns while it is prepared, and the stored record.

Raw: 40 fields between tabs, no header: label, 13 integers I1–I13, 26 categoricals C1–C26 of eight
hexadecimal digits; an empty field is a missing value.

Spilled: temporary files with the good rows of all raw files in their order.

    words.bin       14 words a row: label, log(x + 1)
    C01.bin …       one word a row: first the key, after the vocabulary stage the id

Record, 40 words of 4 bytes, little-endian, row after row:

    word   0        1 … 13             14 … 39
           label    log(x + 1)         row numbers of the embedding tables
           float32  float32            int32
"""

from __future__ import annotations

from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import numpy.typing as npt

from dlrm_hybrid.types import NUM_CATEGORICAL, NUM_DENSE

NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL

FIRST_DENSE_WORD = 1
FIRST_ID_WORD = 1 + NUM_DENSE
RECORD_WORDS = NUM_COLUMNS
RECORD_BYTES = 4 * RECORD_WORDS
BLOCK_ROWS = 1 << 13  # of a shard have a checksum of their own in the manifest

MISSING_KEY = 0  # as facebookresearch/dlrm: an empty categorical reads as hexadecimal 0
VOCABULARY_FOLDER = "vocabulary"
COLUMN_FILES = tuple(f"C{column:02d}.bin" for column in range(1, NUM_CATEGORICAL + 1))


@dataclass(frozen=True, slots=True)
class Spill:
    """The temporary files in `folder`, between the stages of prepare."""

    folder: Path

    @property
    def words(self) -> Path:
        """Label and integers, 14 words a row."""
        return self.folder / "words.bin"

    @property
    def columns(self) -> tuple[Path, ...]:
        """Keys or ids, one file for each categorical column."""
        return tuple(self.folder / name for name in COLUMN_FILES)


def read_rows(file: BufferedReader | BufferedRandom, first: int, into: npt.NDArray[Any]) -> None:
    """Fill a contiguous array with the rows of a file from row `first` on; its width is a row's."""
    file.seek(first * into.strides[0])
    if file.readinto(into.data) != into.nbytes:
        raise OSError(f"{file.name}: a temporary file ends before row {first + len(into)}")
