"""The formats of a row: raw text, spilled columns while it is prepared, and the stored record.

Raw: 40 fields between tabs, no header: label, 13 integers I1–I13, 26 categoricals C1–C26 of eight
hexadecimal digits; an empty field is a missing value.

Spilled: temporary files, one per column, addressed by row position: the number of lines before the
row in all raw files. Bad rows leave holes that nobody reads; `Segment`s list what was written.

    words.bin       14 words per position: label, log(x + 1)
    C01.bin …       one word per position: first the key, after the vocabulary stage the id

Record, 40 words of 4 bytes, little-endian, row after row:

    word   0        1 … 13             14 … 39
           label    log(x + 1)         row numbers of the embedding tables
           float32  float32            int32

Shapes: R rows, D = 14 words (label, 13 integers), F = 26 categorical features.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

NUM_DENSE = 13
NUM_CATEGORICAL = 26
NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL

FIRST_DENSE_WORD = 1
FIRST_ID_WORD = 1 + NUM_DENSE
RECORD_WORDS = NUM_COLUMNS
RECORD_BYTES = 4 * RECORD_WORDS
BLOCK_ROWS = 1 << 13  # of a shard have a checksum of their own in the manifest

MISSING_KEY = 0  # as facebookresearch/dlrm: an empty categorical reads as hexadecimal 0
VOCABULARY_FOLDER = "vocabulary"


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` rows at consecutive positions from `first`."""

    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Spill:
    """The temporary files in `folder`, one per column, between the stages of prepare."""

    folder: Path

    @property
    def words(self) -> Path:
        """Label and integers, 14 words a row."""
        return self.folder / "words.bin"

    def column(self, column: int) -> Path:
        """Keys or ids of categorical column 0 … 25."""
        return self.folder / f"C{column + 1:02d}.bin"

    def create(self) -> None:
        """Make all files, empty."""
        for path in (self.words, *map(self.column, range(NUM_CATEGORICAL))):
            path.touch()

    def write(
        self, first: int, words_RD: npt.NDArray[np.float32], keys_FR: npt.NDArray[np.uint32]
    ) -> None:
        """Put parsed rows at the positions from `first`; many threads may write at a time."""
        with self.words.open("r+b") as file:
            write_rows(file, first, words_RD)
        for column, keys_R in enumerate(keys_FR):
            with self.column(column).open("r+b") as file:
                write_rows(file, first, keys_R)


def read_rows(file: BufferedReader | BufferedRandom, first: int, into: npt.NDArray[Any]) -> None:
    """Fill a contiguous array with the rows of a file from row `first` on; its width is a row's."""
    file.seek(first * into.strides[0])
    if file.readinto(into.data) != into.nbytes:
        raise OSError(f"{file.name}: a temporary file ends before row {first + len(into)}")


def write_rows(file: BufferedRandom, first: int, rows: npt.NDArray[Any]) -> None:
    """Write a contiguous array to the rows of a file from row `first` on."""
    file.seek(first * rows.strides[0])
    file.write(rows.data)


def joined(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Segments in order with the empty ones left out and neighbours made one."""
    result: list[Segment] = []
    for segment in segments:
        if result and result[-1].first + result[-1].rows == segment.first:
            result[-1] = Segment(result[-1].first, result[-1].rows + segment.rows)
        elif segment.rows:
            result.append(segment)
    return tuple(result)


def cut(segments: Iterable[Segment], lengths: Iterable[int]) -> list[tuple[Segment, ...]]:
    """Cut the rows of `segments` into consecutive parts of the given numbers of rows."""
    rest = list(segments)[::-1]
    parts: list[tuple[Segment, ...]] = []
    for length in lengths:
        part: list[Segment] = []
        while length:
            segment = rest.pop()
            taken = min(length, segment.rows)
            part.append(Segment(segment.first, taken))
            if taken < segment.rows:
                rest.append(Segment(segment.first + taken, segment.rows - taken))
            length -= taken
        parts.append(tuple(part))
    return parts


def pieces(segments: Iterable[Segment], max_rows: int) -> Iterator[Segment]:
    """The same rows in segments of at most `max_rows`."""
    for segment in segments:
        for first in range(segment.first, segment.first + segment.rows, max_rows):
            yield Segment(first, min(max_rows, segment.first + segment.rows - first))
