"""First stage of prepare: raw files to spilled columns, each byte read and parsed once.

The caller's process reads and decompresses; blocks of text pass to the workers through a ring of
slots, temporary files that need no shared memory and vanish with their folder. A kernel decides
whether a row is good; `read_row`, the slow and obvious reading of one line, explains what the
kernel refused, and it is an error of this program if the two disagree.

Shapes: R rows, D = 14 words (label, 13 integers), F = 26 categorical features.
"""

from __future__ import annotations

import functools
import os
import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.data import reader
from dlrm_hybrid.data.format import (
    FIRST_DENSE_WORD,
    FIRST_ID_WORD,
    MISSING_KEY,
    NUM_CATEGORICAL,
    NUM_COLUMNS,
)
from dlrm_hybrid.data.spill import Segment, Spill, joined, opened, read_at, write_at
from dlrm_hybrid.data.workers import Report, Workers
from dlrm_hybrid.kernels.parse import count_lines, fill_log_table, parse_rows
from dlrm_hybrid.types import DataError, DlrmError

_WINDOW_PER_WORKER = 3
_QUEUED_PER_WORKER = 2


@dataclass(frozen=True, slots=True)
class BadRowPolicy:
    """What happens to bad rows.

    Attributes:
        stop: the first one is an error.
        max_rows: more are an error even when they are left out.
        quarantine: file that takes the ones left out, if any.
    """

    stop: bool
    max_rows: int
    quarantine: Path | None


@dataclass(frozen=True, slots=True)
class Ingested:
    """What lies in the spill, in file order; good rows and checksum of each raw file; counts."""

    segments: tuple[Segment, ...]
    file_rows: tuple[int, ...]
    file_xxh3: tuple[str, ...]
    bad_rows: int
    zero_keys: int


@dataclass(frozen=True, slots=True)
class _Task:
    """A block of text in a slot, and the position of its first line in the spill."""

    slot: Path
    num_bytes: int
    spill: Spill
    position: int
    max_bad_rows: int


@dataclass(frozen=True, slots=True)
class _Parsed:
    rows: int
    bad: tuple[BadRow, ...]
    zero_keys: int


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a block came from; stays with the reading process."""

    file: int
    first_line: int
    position: int
    raw_bytes: int


def ingest(
    raw: Sequence[Path],
    spill: Spill,
    block_bytes: int,
    policy: BadRowPolicy,
    workers: Workers,
    on_bytes: Callable[[int], None],
) -> Ingested:
    """Read and parse all raw files into the spill.

    Args:
        on_bytes: called with the bytes of the raw files that are done, as they lie on the disk.

    Raises:
        DataError: a file is damaged; a bad row under `policy`: always the first in file order.
    """
    limit = 1 if policy.stop else policy.max_rows + 1
    window = _WINDOW_PER_WORKER * workers.processes
    origins: deque[_Origin] = deque()
    digests = [xxhash.xxh3_128() for _ in raw]
    blocks = reader.blocks(raw, block_bytes, digests)
    tasks = _tasks(blocks, spill, window, limit, origins)
    segments: list[Segment] = []
    file_rows = [0] * len(raw)
    zero_keys = 0
    with _BadRows(raw, policy) as bad_rows:
        parsed = workers.run(_parse, tasks, _ignore, window=window, queued=_QUEUED_PER_WORKER)
        for result in parsed:
            origin = origins.popleft()
            for bad in result.bad:
                bad_rows.add(origin, bad)
            segments.append(Segment(origin.position, result.rows))
            file_rows[origin.file] += result.rows
            zero_keys += result.zero_keys
            on_bytes(origin.raw_bytes)
    return Ingested(
        segments=joined(segments),
        file_rows=tuple(file_rows),
        file_xxh3=tuple(digest.hexdigest() for digest in digests),
        bad_rows=bad_rows.count,
        zero_keys=zero_keys,
    )


def _tasks(
    blocks: Iterator[reader.Block], spill: Spill, slots: int, limit: int, origins: deque[_Origin]
) -> Iterator[_Task]:
    """Copy each block into its slot; slot i is free again when block i + `slots` is asked for."""
    position = 0
    for index, block in enumerate(blocks):
        slot = spill.folder / f"slot_{index % slots}"
        with opened(slot, os.O_WRONLY | os.O_CREAT) as fd:
            write_at(fd, block.text, 0)
        origins.append(_Origin(block.file, block.first_line, position, block.raw_bytes))
        yield _Task(slot, block.text.size, spill, position, limit)
        position += block.lines


def _parse(task: _Task, _: Report) -> _Parsed:
    text = np.empty(task.num_bytes, np.uint8)
    with opened(task.slot, os.O_RDONLY) as fd:
        read_at(fd, text, 0)
    columns = parse(text, task.max_bad_rows)
    rows = columns.words_RD.shape[0]
    if rows:
        task.spill.write(task.position, columns.words_RD, columns.keys_FR)
    return _Parsed(rows, columns.bad, columns.zero_keys)


def _ignore(rows: int) -> None:
    """Blocks report nothing on their way: their results do."""


@dataclass(slots=True)
class _BadRows:
    """Applies the policy to bad rows in file order."""

    raw: Sequence[Path]
    policy: BadRowPolicy
    count: int = 0
    _stack: ExitStack = field(default_factory=ExitStack)
    _file: BinaryIO | None = None

    def __enter__(self) -> _BadRows:
        if self.policy.quarantine is not None:
            self._file = self._stack.enter_context(self.policy.quarantine.open("wb"))
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
        self._stack.close()

    def add(self, origin: _Origin, bad: BadRow) -> None:
        """Count, keep or refuse one bad row."""
        path = self.raw[origin.file]
        line = origin.first_line + bad.line
        if len(bad.raw) > reader.MAX_LINE_BYTES:
            raise reader.long_line(path, line)
        name = column_name(bad.column)
        reason = f"{line}:{bad.column}: {name}{': ' if name else ''}{bad.reason}"
        self.count += 1
        if self.policy.stop:
            raise DataError(f"{path}:{reason} (data.on_bad_row=error)")
        if self.count > self.policy.max_rows:
            raise DataError(
                f"more than {self.policy.max_rows} bad rows (data.max_bad_rows); {path}:{reason}"
            )
        if self._file is not None:
            self._file.write(f"{path.name}:{reason}\t".encode() + bad.raw + b"\n")


_LOG_TABLE_SIZE = 1 << 14
_SHOWN_CHARACTERS = 40
_INTEGER = re.compile(r"-?[0-9]+")
_MAX_DIGITS = 10
_KEY = re.compile(r"[0-9a-fA-F]{8}")


class RowError(Exception):
    """A row cannot be read; `column` counts from 1."""

    def __init__(self, column: int, reason: str) -> None:
        super().__init__(column, reason)
        self.column = column
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Row:
    """One line read slowly: label, integers (missing: 0), keys (missing: `MISSING_KEY`)."""

    label: int
    integers: tuple[int, ...]
    keys: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class BadRow:
    """A refused line.

    Attributes:
        line: within its block, from 0.
        column: the field at fault, from 1.
        reason: what is wrong, with the value, escaped and shortened, in one printable line.
        raw: the line without its newline.
    """

    line: int
    column: int
    reason: str
    raw: bytes


@dataclass(frozen=True, slots=True)
class Columns:
    """The good rows of a block, and the bad ones.

    Attributes:
        words_RD: float32, label and log(x + 1) of the integers.
        keys_FR: uint32, each column contiguous.
        bad: the first bad rows in line order, as many as were asked for.
        zero_keys: fields that hold 00000000.
    """

    words_RD: npt.NDArray[np.float32]
    keys_FR: npt.NDArray[np.uint32]
    bad: tuple[BadRow, ...]
    zero_keys: int


def column_name(column: int) -> str:
    """`label`, `I1` … `I13`, `C1` … `C26` for columns 1 … 40; empty beyond."""
    if column == 1:
        return "label"
    if column <= FIRST_ID_WORD:
        return f"I{column - FIRST_DENSE_WORD}"
    return f"C{column - FIRST_ID_WORD}" if column <= NUM_COLUMNS else ""


def _shown(value: bytes) -> str:
    """The value between quotes: escaped, so that it is printable ASCII, and shortened."""
    text = value[: _SHOWN_CHARACTERS + 1].decode("utf-8", errors="backslashreplace")
    quoted = ascii(text[:_SHOWN_CHARACTERS]).replace("\\\\x", "\\x")
    return f"{quoted}…" if len(value) > _SHOWN_CHARACTERS else quoted


def _check_bytes(line: bytes) -> None:
    for column, value in enumerate(line.split(b"\t"), start=1):
        if b"\0" in value:
            raise RowError(column, f"NUL byte in {_shown(value)}")
        try:
            value.decode("utf-8")
        except UnicodeDecodeError:
            raise RowError(column, f"not UTF-8: {_shown(value)}") from None


def _check_count(line: bytes, fields: list[bytes]) -> None:
    if len(fields) == NUM_COLUMNS:
        return
    reason = f"{len(fields)} columns instead of {NUM_COLUMNS} in {_shown(line)}"
    if len(fields) == NUM_COLUMNS - 1:
        reason += " (rows of Criteo's test.txt have no label and cannot be used; use train.txt)"
    raise RowError(min(len(fields), NUM_COLUMNS + 1), reason)


def _integer(field: bytes, column: int) -> int:
    if not field:
        return 0
    text = field.decode()
    if not _INTEGER.fullmatch(text):
        raise RowError(column, f"{_shown(field)} is not an integer")
    if len(text.lstrip("-")) > _MAX_DIGITS or not -(2**31) <= int(text) < 2**31:
        raise RowError(column, f"{_shown(field)} is outside 32 bits")
    return int(text)


def _key(field: bytes, column: int) -> int:
    if not field:
        return MISSING_KEY
    text = field.decode()
    if not _KEY.fullmatch(text):
        raise RowError(column, f"{_shown(field)} is not eight hexadecimal digits")
    return int(text, 16)


def read_row(line: bytes) -> Row:
    r"""Read one line with its `\n` or `\r\n`, slowly.

    Raises:
        RowError: with the first fault of the line.
    """
    if not line.endswith(b"\n"):
        fields = line.count(b"\t") + 1
        raise RowError(fields, f"the file ends inside this line: {_shown(line)}")
    line = line[:-1].removesuffix(b"\r")
    _check_bytes(line)
    fields = line.split(b"\t")
    _check_count(line, fields)
    if fields[0] not in (b"0", b"1"):
        raise RowError(1, f"label {_shown(fields[0])} is neither 0 nor 1")
    numbered = list(enumerate(fields, start=1))
    return Row(
        label=int(fields[0]),
        integers=tuple(_integer(field, i) for i, field in numbered[1:FIRST_ID_WORD]),
        keys=tuple(_key(field, i) for i, field in numbered[FIRST_ID_WORD:]),
    )


def _explain(line: bytes, number: int) -> BadRow:
    try:
        read_row(line)
    except RowError as fault:
        return BadRow(number, fault.column, fault.reason, line.removesuffix(b"\n"))
    raise DlrmError(f"internal error: the parser refused a good row: {_shown(line)}")


@functools.cache
def _log_table() -> npt.NDArray[np.float32]:
    table = np.empty(_LOG_TABLE_SIZE, np.float32)
    fill_log_table(table)
    return table


def parse(text: npt.NDArray[np.uint8], max_bad_rows: int) -> Columns:
    """Parse a block of lines; a last line without newline is a bad row.

    Args:
        text: uint8, contiguous and writable (one compiled kernel serves all).
        max_bad_rows: how many bad rows to explain; the others are only left out.
    """
    lines, end = count_lines(text)
    words_LD = np.empty((lines, FIRST_ID_WORD), np.float32)
    keys_FL = np.empty((NUM_CATEGORICAL, lines), np.uint32)
    bad_L3 = np.empty((lines, 3), np.int64)
    rows, num_bad, zero_keys = parse_rows(text[:end], _log_table(), words_LD, keys_FL, bad_L3)
    bad = [
        _explain(text[start:end].tobytes(), line)
        for start, end, line in bad_L3[: min(num_bad, max_bad_rows)].tolist()
    ]
    if end < text.size:
        bad.append(_explain(text[end:].tobytes(), lines))
    return Columns(words_LD[:rows], keys_FL[:, :rows], tuple(bad[:max_bad_rows]), zero_keys)
