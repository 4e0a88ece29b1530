"""Parsed rows between the stages: temporary files, one per column, addressed by row position.

A row's position is the number of lines before it in all raw files. Bad rows leave holes that
nobody reads; `Segment`s list what was written.

    words.bin       14 words per position: label, log(x + 1)
    C01.bin …       one word per position: first the key, after the vocabulary stage the id

Shapes: R rows.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.format import FIRST_ID_WORD, NUM_CATEGORICAL

WORD_BYTES = 4
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """`rows` rows at consecutive positions from `first`."""

    first: int
    rows: int


@dataclass(frozen=True, slots=True)
class Spill:
    """The temporary files in `folder`."""

    folder: Path

    @property
    def words(self) -> Path:
        """Label and integers, 14 words a row."""
        return self.folder / "words.bin"

    def column(self, column: int) -> Path:
        """Keys or ids of categorical column 0 … 25."""
        return self.folder / f"C{column + 1:02d}.bin"

    def write(
        self, first: int, words_RD: npt.NDArray[np.float32], keys_FR: npt.NDArray[np.uint32]
    ) -> None:
        """Put parsed rows at the positions from `first`."""
        with opened(self.words, os.O_WRONLY | os.O_CREAT) as fd:
            write_at(fd, words_RD, first * FIRST_ID_WORD * WORD_BYTES)
        for column in range(NUM_CATEGORICAL):
            with opened(self.column(column), os.O_WRONLY | os.O_CREAT) as fd:
                write_at(fd, keys_FR[column], first * WORD_BYTES)


@contextmanager
def opened(path: Path, flags: int) -> Generator[int, None, None]:
    """A file descriptor for the time of a with statement."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    try:
        yield fd
    finally:
        os.close(fd)


def bytes_of(array: Array) -> memoryview:
    """The memory of a contiguous array, empty or not."""
    assert array.flags.c_contiguous  # a copy would swallow what is read into it
    return array.reshape(-1).view(np.uint8).data


def read_at(fd: int, into: Array, offset_bytes: int) -> None:
    """Fill a contiguous array from a file that is long enough."""
    view = bytes_of(into)
    done = 0
    while done < len(view):
        got = os.preadv(fd, [view[done:]], offset_bytes + done)
        if got == 0:
            raise OSError(f"a temporary file ends at byte {offset_bytes + done}")
        done += got


def write_at(fd: int, array: Array, offset_bytes: int) -> None:
    """Write a contiguous array, all of it."""
    view = bytes_of(array)
    done = 0
    while done < len(view):
        done += os.pwrite(fd, view[done:], offset_bytes + done)


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
