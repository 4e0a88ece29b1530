"""Files of tables as blocks of columns: CSV with a header, Parquet, structured .npy.

Blocks hold what is in the files, as Arrow arrays; `values` makes numbers and categories of it. All
columns of CSV are bytes here. Memory holds one block, of Parquet one row group of the columns read.

Shapes: N rows of a block.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.sources import text
from dlrm_hybrid.data.sources.arrow import ArrowError, Batch, pa, pa_csv, parquet
from dlrm_hybrid.types import DataError

BLOCK_ROWS = 1 << 16  # of Parquet and .npy
# Arrow reads 32 of its blocks of CSV ahead: these are pieces of ours, so that it is not 32 of ours.
PIECES = 8
_HEAD_BYTES = 1 << 20
_READ_BYTES = 1 << 16  # of each Parquet column at a time; else whole columns of a row group
_PARQUET = b"PAR1"
_NPY = b"\x93NUMPY"
_SHOWN_NAMES = 8
_ODD = re.compile(r"Row #(\d+): Expected (\d+) columns, got (\d+)")


@dataclass(frozen=True, slots=True)
class OddRow:
    """A row of text that has more or fewer fields than the header.

    Attributes:
        row: its number in the file, from 1; the header is not counted.
        reason: what is wrong.
        raw: the row.
    """

    row: int
    reason: str
    raw: str


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one file.

    Attributes:
        columns: those that were asked for, with their names.
        row_N: int64, number of each row in its file, from 1.
        odd: rows between these that have no columns.
    """

    columns: Batch
    row_N: npt.NDArray[np.int64]
    odd: tuple[OddRow, ...]


class Source(Protocol):
    """One file of rows."""

    @property
    def names(self) -> Sequence[str]:
        """All its columns."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether all its bytes are shown as they are read; others are read here and there."""
        ...

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Some of its columns, block after block.

        Raises:
            DataError: the file is damaged.
        """
        ...


def open_source(
    path: Path,
    delimiter: str,
    block_bytes: int,
    seen: Callable[[bytes], object],
    key: str = text.RAW_KEY,
) -> Source:
    """A file by its first bytes, or as CSV.

    Args:
        path: of the file; text may be compressed by gzip or zstd.
        delimiter: between the columns of CSV.
        block_bytes: of text, read at a time.
        seen: called with the bytes of a file of text as they are read, as stored.
        key: of the configuration that names the file, for messages.

    Raises:
        DataError: it cannot be read, or is of no kind that is known.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_NPY))
        if head.startswith(_PARQUET):
            return _Parquet(path, key)
        if head == _NPY:
            return _Npy(path, key)
        return _Csv(path, delimiter, block_bytes, seen, key)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} ({key})") from error


def check_names(path: Path, found: Sequence[str], wanted: Sequence[str], known: set[str]) -> None:
    """See that a file has the columns of a schema, and no other ones.

    Args:
        path: of the file.
        found: its columns.
        wanted: those that are read.
        known: all that the schema mentions.

    Raises:
        DataError: it has not; names the columns.
    """
    twice = [name for name, count in Counter(found).items() if count > 1]
    missing = [name for name in wanted if name not in found]
    foreign = [name for name in found if name not in known]
    if twice:
        raise DataError(f"{path}: column {twice[0]!r} is there twice")
    if missing:
        raise DataError(f"{path}: no column {_some(missing)}; it has {_some(found)} (data.schema)")
    if foreign:
        raise DataError(
            f"{path}: column {_some(foreign)}: not in the schema; use it or name it in `ignore` "
            "(data.schema)"
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(repr(name) for name in names[:_SHOWN_NAMES]) + more


@contextmanager
def _damage(path: Path, key: str) -> Generator[None, None, None]:
    try:
        yield
    except (ArrowError, OSError) as error:
        first = (str(error).splitlines() or [""])[0]
        if odd := _ODD.search(first):  # it could not be handed to `note`: Arrow counts the header
            row, wanted, found = map(int, odd.groups())
            raise DataError(
                f"{path}: row {row - 1}: {found} columns instead of {wanted}, and bytes that are "
                f"not UTF-8: such a row cannot be skipped ({key})"
            ) from error
        raise DataError(f"{path}: cannot be read: {first} ({key})") from error


@contextmanager
def _no_report() -> Generator[None, None, None]:
    """Without Python's report of what Arrow cannot hand on; Arrow's own error says it."""
    before = sys.unraisablehook

    def report(found: Any) -> None:
        if not isinstance(found.exc_value, UnicodeDecodeError):
            before(found)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = before


def _batches(reader: Iterator[Batch]) -> Iterator[Batch]:
    while True:
        with _no_report():
            batch = next(reader, None)
        if batch is None:
            return
        yield batch


class _Text(io.RawIOBase):
    """Decompressed text as the file that Arrow reads from."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = bytearray()

    def readable(self) -> bool:
        """Yes."""
        return True

    def read(self, size: int = -1) -> bytes:
        """So many bytes, fewer at the end."""
        while size < 0 or len(self._rest) < size:
            chunk = next(self._chunks, None)
            if chunk is None:
                break
            self._rest += chunk
        size = len(self._rest) if size < 0 else size
        found = bytes(self._rest[:size])
        del self._rest[:size]
        return found


class _Csv:
    def __init__(
        self,
        path: Path,
        delimiter: str,
        block_bytes: int,
        seen: Callable[[bytes], object],
        key: str,
    ) -> None:
        self._path = path
        self._key = key
        self._delimiter = delimiter
        self._block_bytes = block_bytes
        self._seen = seen
        head = bytearray()
        with path.open("rb") as file:
            for chunk in text.read_text(file, path, _HEAD_BYTES, lambda piece: None, key):
                head += chunk
                if len(head) >= _HEAD_BYTES:
                    break
        try:
            lines = head.decode("utf-8-sig", errors="ignore")
            reader = csv.reader(io.StringIO(lines, newline=""), delimiter=delimiter)
            self._names = tuple(next(reader, ()))
        except csv.Error as error:
            raise DataError(f"{path}: row 0: no header of CSV: {error} ({key})") from error
        if not self._names:
            raise DataError(f"{path}: empty: no header ({key})")

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def is_text(self) -> bool:
        return True

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        pieces: list[Block] = []
        try:
            for piece in self._pieces(names):
                pieces.append(piece)
                if len(pieces) == PIECES:
                    yield _joined(pieces)
                    pieces = []
        except DataError:
            if pieces:  # what is wrong with these rows comes first
                yield _joined(pieces)
            raise
        if pieces:
            yield _joined(pieces)

    def _pieces(self, names: Sequence[str]) -> Iterator[Block]:
        odd: list[OddRow] = []

        def note(row: Any) -> str:
            # Arrow counts the header as a row.
            reason = f"{row.actual_columns} columns instead of {row.expected_columns}"
            odd.append(OddRow(int(row.number) - 1, reason, str(row.text)))
            return "skip"

        options: dict[str, Any] = {
            "read_options": pa_csv.ReadOptions(
                use_threads=False, block_size=max(self._block_bytes // PIECES, 1 << 16)
            ),
            "parse_options": pa_csv.ParseOptions(
                delimiter=self._delimiter, newlines_in_values=True, invalid_row_handler=note
            ),
            "convert_options": pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.binary()),
                include_columns=list(names),
                strings_can_be_null=True,
                null_values=[""],
            ),
        }
        last = 0
        with self._path.open("rb") as file, _damage(self._path, self._key):
            piece_bytes = _HEAD_BYTES // 8
            chunks = text.read_text(file, self._path, piece_bytes, self._seen, self._key)
            with _no_report():
                opened = pa_csv.open_csv(pa.PythonFile(_Text(chunks), "r"), **options)
            with opened as reader:
                for batch in _batches(reader):
                    row_N = _numbers(batch.num_rows, last, odd)
                    last = int(row_N[-1]) if len(row_N) else last
                    before = tuple(one for one in odd if one.row <= last)
                    odd[:] = [one for one in odd if one.row > last]
                    yield Block(batch, row_N, before)
        if odd:
            nothing = [pa.array([], pa.binary())] * len(names)
            rest = pa.record_batch(nothing, list(names))
            yield Block(rest, np.empty(0, np.int64), tuple(odd))


def _joined(pieces: Sequence[Block]) -> Block:
    """Consecutive blocks as one."""
    columns: Any = pa.Table.from_batches([one.columns for one in pieces]).combine_chunks()
    whole = columns.to_batches()
    return Block(
        whole[0] if whole else pieces[0].columns,
        np.concatenate([one.row_N for one in pieces]),
        tuple(odd for one in pieces for odd in one.odd),
    )


def _numbers(count: int, last: int, odd: Sequence[OddRow]) -> npt.NDArray[np.int64]:
    """Numbers of rows that Arrow gave, those of odd ones left out."""
    numbers = np.arange(last + 1, last + 1 + count + len(odd), dtype=np.int64)
    return numbers[~np.isin(numbers, [one.row for one in odd])][:count]


class _Parquet:
    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        with _damage(path, key):
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)
            self._names = tuple(cast("list[str]", self._file.schema_arrow.names))

    @property
    def names(self) -> Sequence[str]:
        return self._names

    @property
    def is_text(self) -> bool:
        return False

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        first = 1
        with _damage(self._path, self._key):
            batches = self._file.iter_batches(BLOCK_ROWS, columns=list(names), use_threads=False)
            for batch in batches:
                rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
                first += batch.num_rows
                yield Block(batch.select(list(names)), rows, ())


class _Npy:
    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        try:
            self._rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise DataError(f"{path}: not a .npy file to read: {error} ({key})") from error
        if self._rows.dtype.names is None or self._rows.ndim != 1:
            raise DataError(
                f"{path}: {self._rows.dtype} {list(self._rows.shape)}: a table in a .npy file is "
                f"a structured array of one dimension, with a field for each column ({key})"
            )

    @property
    def names(self) -> Sequence[str]:
        return self._rows.dtype.names

    @property
    def is_text(self) -> bool:
        return False

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        for first in range(0, len(self._rows), BLOCK_ROWS):
            part = self._rows[first : first + BLOCK_ROWS]
            with _damage(self._path, self._key):
                arrays = [_arrow(np.ascontiguousarray(part[name])) for name in names]
                batch = pa.record_batch(arrays, list(names))
            yield Block(batch, np.arange(first + 1, first + 1 + len(part), dtype=np.int64), ())


def _arrow(values: npt.NDArray[Any]) -> Any:
    """A field of a structured array; one of several values is a list."""
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))
