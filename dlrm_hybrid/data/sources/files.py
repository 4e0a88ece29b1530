"""Reads tables in blocks of columns: CSV, Parquet, structured .npy.

Blocks hold the content of the files as Arrow arrays, those of CSV as bytes; `values` parses it.
Memory holds one block, or for Parquet the read columns of one row group.

Shapes: N rows of a block.
"""

from __future__ import annotations

import codecs
import csv
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BufferedReader
from pathlib import Path
from tokenize import TokenError
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.arrays import Bytes, Int64s
from dlrm_hybrid.data.schema import Dialect, some_names
from dlrm_hybrid.data.sources.arrow import ArrowError, Batch, pa, pa_csv, parquet
from dlrm_hybrid.data.sources.paths import folder_values
from dlrm_hybrid.data.sources.text import MAX_LINE_BYTES, RAW_KEY, read_text
from dlrm_hybrid.kernels.delimited import HEADER_AGAIN, NO_QUOTE, OPEN, TORN, split_rows
from dlrm_hybrid.types import DataError, DlrmError

BLOCK_ROWS = 1 << 16  # of Parquet and .npy
_HEAD_BYTES = 1 << 20  # limit of a CSV header
_CHUNK_BYTES = 1 << 17  # of a CSV file, read at a time
_ODD_ROWS = 1 << 14  # limit in one block of CSV
_QUOTE = '"'
_READ_BYTES = 1 << 16  # of each Parquet column at a time; else whole columns of a row group
_PARQUET = b"PAR1"
_FOOTER_LENGTH_BYTES = 4
_MOST_INDEX_BYTES = 1 << 20
_NPY = b"\x93NUMPY"
# numpy evaluates a header with Python's parser, and maps as many bytes as it says.
_NPY_FAULTS = (ValueError, TypeError, OverflowError, SyntaxError, TokenError, RecursionError)


class BadRow(NamedTuple):
    """A row that cannot be used.

    Attributes:
        row: number in the file, from 1; a header is not counted.
        column: name of the column at fault; empty if the whole row is wrong.
        reason: what is wrong, with the value, in one printable line.
    """

    row: int
    column: str
    reason: str
    raw: str

    @property
    def where(self) -> str:
        """Row, column and reason, for messages."""
        column = f"column {self.column!r}: " if self.column else ""
        return f"row {self.row}: {column}{self.reason}"


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of one file.

    Attributes:
        columns: the columns asked for, with their names.
        row_N: int64, number of each row in its file, from 1.
        odd: rows of text between these that are set aside: of another number of fields, or headers.
        remark: what looks wrong with these rows, or empty.
    """

    columns: Batch
    row_N: Int64s
    odd: tuple[BadRow, ...]
    remark: str = ""


class TableSource(Protocol):
    """A file that rows are read from."""

    @property
    def names(self) -> Sequence[str]:
        """Names of all columns, in their order."""
        ...

    @property
    def is_text(self) -> bool:
        """Whether the file is read once from beginning to end, and `seen` gets all its bytes."""
        ...

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        """Yield blocks of these columns; raises DataError if the file is damaged."""
        ...


def open_source(
    path: Path,
    dialect: Dialect,
    block_bytes: int,
    seen: Callable[[bytes], object],
    key: str = RAW_KEY,
) -> TableSource:
    """Open a table: Parquet or .npy by its first bytes, else CSV.

    Args:
        path: the file; text may be compressed by gzip or zstd.
        block_bytes: bytes of text read at a time.
        seen: called with the bytes of a text file as they are read, before decompression.
        key: configuration key that names the file, for messages.

    Raises:
        DataError: it cannot be read, or is of another kind.
    """
    try:
        with path.open("rb") as file:
            head = file.read(len(_NPY))
        if head.startswith(_PARQUET):
            source = _Parquet(path, key)
        elif head == _NPY:
            source = _Npy(path, key)
        else:
            source = _Delimited(path, dialect, block_bytes, seen, key)
        values = {
            name: value for name, value in folder_values(path).items() if name not in source.names
        }
        return _InFolders(source, values) if values else source
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} ({key})") from error


def check_names(
    path: Path, names: Sequence[str], required: Sequence[str], allowed: set[str]
) -> None:
    """Check that a file has the columns of a schema and no others.

    Args:
        required: columns that are read.
        allowed: all columns that the schema names.

    Raises:
        DataError: a column is missing, unknown or there twice; names it.
    """
    twice = [name for name, count in Counter(names).items() if count > 1]
    missing = [name for name in required if name not in names]
    foreign = [name for name in names if name not in allowed]
    if twice:
        raise DataError(f"{path}: column {twice[0]!r} is there twice: rename one of them")
    if missing:
        has = some_names(names)
        hint = ": does the schema have its `delimiter`?" if len(names) == 1 else ""
        raise DataError(
            f"{path}: no column {some_names(missing)}; it has {has}{hint} (data.schema)"
        )
    if foreign:
        raise DataError(
            f"{path}: column {some_names(foreign)}: not in the schema; use it or name it in "
            "`ignore` (data.schema)"
        )


@contextmanager
def _damage(path: Path, key: str) -> Generator[None, None, None]:
    try:
        yield
    except (ArrowError, OSError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise DataError(f"{path}: cannot be read: {first} ({key})") from error


class _Delimited:
    is_text = True

    def __init__(
        self,
        path: Path,
        dialect: Dialect,
        block_bytes: int,
        seen: Callable[[bytes], object],
        key: str,
    ) -> None:
        self._path = path
        self._key = key
        self._dialect = dialect
        self._block_bytes = block_bytes
        self._seen = seen
        self._header = b""
        self.names: Sequence[str] = ()
        with path.open("rb") as file:
            text = bytearray()
            is_end = _fill(text, self._chunks(file, lambda piece: None), _HEAD_BYTES)
        bom = len(codecs.BOM_UTF8) * text.startswith(codecs.BOM_UTF8)
        split = self._split(text, bom, is_end, most_rows=1)
        if not split.rows:
            if split.fault or not is_end:
                raise self._fault(split, 0)
            raise DataError(f"{path}: empty: no header ({key})")
        if dialect.names:  # the kernel sets a line equal to the header aside
            self._header = dialect.delimiter.join(dialect.names).encode()
            self.names, self._body = dialect.names, bom
            return
        self._body = split.end
        self._header = bytes(text[bom : split.end]).strip(b"\r\n")
        self.names = self._read_names()

    def _read_names(self) -> tuple[str, ...]:
        quoting = csv.QUOTE_NONE if self._dialect.quote == "none" else csv.QUOTE_MINIMAL
        try:
            header = self._header.decode()
            reader = csv.reader([header], delimiter=self._dialect.delimiter, quoting=quoting)
            return tuple(next(reader))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"{self._path}: row 0: no header of CSV: {error} ({self._key})"
            ) from error

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        text, begin, row, is_end = bytearray(), self._body, 0, False
        target_bytes = begin + self._block_bytes
        with self._path.open("rb") as file, _damage(self._path, self._key):
            chunks = self._chunks(file, self._seen)
            while text or not is_end:
                is_end = is_end or _fill(text, chunks, target_bytes)
                split = self._split(text, begin, is_end)
                block = self._block(text, begin, split, row, names)
                is_long = split.end == begin and len(text) - begin > self._most_row_bytes
                text, begin = text[split.end :], 0
                if split.rows:
                    yield block
                row += split.rows
                if split.fault == TORN or (split.fault and is_end) or is_long:
                    raise self._fault(split, row)
                target_bytes = max(self._block_bytes, 2 * len(text))

    @property
    def _most_row_bytes(self) -> int:
        return max(self._block_bytes, MAX_LINE_BYTES)

    def _chunks(self, file: BufferedReader, seen: Callable[[bytes], object]) -> Iterator[bytes]:
        return read_text(file, self._path, _CHUNK_BYTES, seen, self._key)

    def _split(
        self, text: bytearray, begin: int, is_end: bool, most_rows: int = sys.maxsize
    ) -> _Rows:
        odd_K4 = np.empty((_ODD_ROWS, 4), np.int64)
        rows, end, odd, *fault = split_rows(
            _read_only(text)[begin:],
            _read_only(self._header),
            ord(self._dialect.delimiter),
            NO_QUOTE if self._dialect.quote == "none" else ord(_QUOTE),
            len(self.names),
            most_rows,
            is_end,
            odd_K4,
        )
        odd_K4[:, :2] += begin
        return _Rows(rows, begin + end, odd_K4[:odd], *fault)

    def _block(
        self, text: bytearray, begin: int, split: _Rows, before: int, names: Sequence[str]
    ) -> Block:
        odd = tuple(self._odd(text, before, *four) for four in split.odd_K4.tolist())
        row_N = np.arange(before + 1, before + 1 + split.rows, dtype=np.int64)
        row_N = np.delete(row_N, split.odd_K4[:, 3])
        cuts = [begin, *split.odd_K4[:, :2].reshape(-1).tolist(), split.end]
        batch = self._batch(_together(text, cuts), names) if len(row_N) else _nothing(names)
        if batch.num_rows != len(row_N):
            raise DlrmError(
                f"internal error: {self._path}: Arrow reads {batch.num_rows} rows of "
                f"{len(row_N)} behind row {before}"
            )
        first = before + 1 + split.alike_row
        remark = f"row {first}: {split.alike:,} lines between quotes look like rows"
        return Block(batch, row_N, odd, remark if split.alike else "")

    def _odd(
        self, text: bytearray, before: int, begin: int, end: int, values: int, row: int
    ) -> BadRow:
        reason = f"{values} columns instead of {len(self.names)}"
        if values == HEADER_AGAIN:
            reason = "the header again, as where files were put together"
        raw = text[begin:end].rstrip(b"\r\n").decode(errors="backslashreplace")
        return BadRow(before + 1 + row, "", reason, raw)

    def _batch(self, body: Any, names: Sequence[str]) -> Batch:
        """Parse good rows with Arrow, in this thread alone: no thread of Arrow's touches Python."""
        numbers = [str(self.names.index(name)) for name in names]
        table = pa_csv.read_csv(
            pa.BufferReader(body),
            read_options=pa_csv.ReadOptions(
                use_threads=False,
                block_size=body.size,
                column_names=list(map(str, range(len(self.names)))),
            ),
            parse_options=pa_csv.ParseOptions(
                delimiter=self._dialect.delimiter,
                quote_char=False if self._dialect.quote == "none" else _QUOTE,
                newlines_in_values=True,
            ),
            convert_options=pa_csv.ConvertOptions(
                column_types=dict.fromkeys(numbers, pa.binary()),
                include_columns=numbers,
                strings_can_be_null=True,
                null_values=[""],
            ),
        )
        return table.rename_columns(list(names)).combine_chunks().to_batches()[0]

    def _fault(self, split: _Rows, row: int) -> DataError:
        number = row + bool(self.names)  # the header is row 0
        if not split.fault:
            most = f"longer than {self._most_row_bytes} bytes (data.block_bytes)"
            return DataError(f"{self._path}: row {number}: {most} ({self._key})")
        column = f"column {self.names[split.value]!r}: " if split.value < len(self.names) else ""
        reason = (
            "a quote begins here and has no end"
            if split.fault == OPEN
            else "the end of a quote that begins here is in the middle of a value, lines later"
        )
        advice = "`quote: none` in the schema takes quotes for text"
        return DataError(f"{self._path}: row {number}: {column}{reason}; {advice} ({self._key})")


@dataclass(frozen=True, slots=True)
class _InFolders:
    """A file with more columns from the names of its folders."""

    inner: TableSource
    values: Mapping[str, str | None]

    @property
    def names(self) -> Sequence[str]:
        return (*self.inner.names, *self.values)

    @property
    def is_text(self) -> bool:
        return self.inner.is_text

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        for block in self.inner.blocks([name for name in names if name not in self.values]):
            rows = len(block.row_N)
            arrays = [
                pa.array([self.values[name]] * rows, pa.string())
                if name in self.values
                else block.columns.column(name)
                for name in names
            ]
            yield replace(block, columns=pa.record_batch(arrays, list(names)))


class _Rows(NamedTuple):
    """Result of `split_rows`: the complete rows of a text."""

    rows: int
    end: int
    odd_K4: Int64s
    fault: int
    value: int
    alike: int
    alike_row: int


def _fill(text: bytearray, chunks: Iterator[bytes], num_bytes: int) -> bool:
    """Append chunks to a text until it has `num_bytes`; returns whether the chunks are used up."""
    while len(text) < num_bytes:
        chunk = next(chunks, None)
        if chunk is None:
            return True
        text += chunk
    return False


def _read_only(text: bytes | bytearray) -> Bytes:
    return np.frombuffer(memoryview(text).toreadonly(), np.uint8)


def _together(text: bytearray, cuts: Sequence[int]) -> Any:
    """Copy the pieces of a text between each pair of cuts into one Arrow buffer."""
    pieces = [_read_only(text)[a:b] for a, b in zip(cuts[::2], cuts[1::2], strict=True)]
    body: Any = pa.allocate_buffer(sum(map(len, pieces)))
    np.concatenate(pieces, out=np.frombuffer(body, np.uint8))
    return body


def _nothing(names: Sequence[str]) -> Batch:
    return pa.record_batch([pa.array([], pa.binary())] * len(names), list(names))


class _Parquet:
    is_text = False

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        with _damage(path, key):
            self._file = parquet.ParquetFile(path, pre_buffer=False, buffer_size=_READ_BYTES)
            self.names = tuple(cast("list[str]", self._file.schema_arrow.names))
            if _is_put_together(path, self._file.metadata):
                raise DataError(
                    f"{path}: Parquet files put together byte by byte, of which only the last one "
                    f"would be read: write their rows as one file, or name each of them ({key})"
                )

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        first = 1
        with _damage(self._path, self._key):
            batches = self._file.iter_batches(BLOCK_ROWS, columns=list(names), use_threads=False)
            for batch in batches:
                rows = np.arange(first, first + batch.num_rows, dtype=np.int64)
                first += batch.num_rows
                yield Block(batch.select(list(names)), rows, ())


def _is_put_together(path: Path, metadata: Any) -> bool:
    """Whether Parquet files were concatenated byte by byte.

    The last footer counts bytes from its own file's beginning: if the files have their columns in
    the same places, rows of the first would be read as rows of the last.
    """
    footer = path.stat().st_size - metadata.serialized_size - len(_PARQUET) - _FOOTER_LENGTH_BYTES
    end = len(_PARQUET)
    for group in (
        [metadata.row_group(metadata.num_row_groups - 1)] if metadata.num_row_groups else []
    ):
        columns = [group.column(index) for index in range(group.num_columns)]
        starts = [column.dictionary_page_offset or column.data_page_offset for column in columns]
        sizes = [column.total_compressed_size for column in columns]
        end = max(map(sum, zip(starts, sizes, strict=True)))
    if footer == end:
        return False
    with path.open("rb") as file:  # there may also be indices before the footer
        first = max(0, footer - end - _MOST_INDEX_BYTES)
        file.seek(first)
        return 2 * _PARQUET in file.read(footer - end - first + 2 * len(_PARQUET))


class _Npy:
    is_text = False

    def __init__(self, path: Path, key: str) -> None:
        self._path = path
        self._key = key
        try:
            with np.errstate(over="ignore"):  # an overflowing size in the header raises anyway
                self._rows = np.load(path, mmap_mode="r", allow_pickle=False)
        except _NPY_FAULTS as error:
            first = str(error).partition("\n")[0]
            raise DataError(f"{path}: not a .npy file to read: {first} ({key})") from error
        if self._rows.dtype.names is None or self._rows.ndim != 1:
            raise DataError(
                f"{path}: {self._rows.dtype} {list(self._rows.shape)}: a table in a .npy file is "
                f"a structured array of one dimension, with a field for each column ({key})"
            )
        self.names: Sequence[str] = self._rows.dtype.names
        end = int(getattr(self._rows, "offset", 0)) + self._rows.nbytes
        if more := path.stat().st_size - end:
            raise DataError(f"{path}: {more} bytes behind its {len(self._rows)} rows ({key})")

    def blocks(self, names: Sequence[str]) -> Iterator[Block]:
        for first in range(0, len(self._rows), BLOCK_ROWS):
            part = self._rows[first : first + BLOCK_ROWS]
            with _damage(self._path, self._key):
                arrays = [self._column(np.ascontiguousarray(part[name]), name) for name in names]
                batch = pa.record_batch(arrays, list(names))
            yield Block(batch, np.arange(first + 1, first + 1 + len(part), dtype=np.int64), ())

    def _column(self, values: npt.NDArray[Any], name: str) -> Any:
        try:
            return _arrow(_usual(values))
        except ArrowError as error:
            raise DataError(
                f"{self._path}: field {name!r}: {values.dtype} is not read: {error} ({self._key})"
            ) from error


def _usual(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Cast values to types Arrow has: native byte order, and times in seconds or finer units."""
    kind = values.dtype
    if kind.kind == "M" and np.datetime_data(kind)[0] not in ("s", "ms", "us", "ns", "D"):
        return values.astype("M8[s]")
    return values.astype(kind.newbyteorder("="), copy=False)


def _arrow(values: npt.NDArray[Any]) -> Any:
    """Convert a field of a structured array; a field with several values becomes lists."""
    if values.ndim == 1:
        return pa.array(values)
    flat = pa.array(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(flat, int(np.prod(values.shape[1:])))
