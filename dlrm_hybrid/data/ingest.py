"""First stage of prepare: raw files to spilled columns, each byte read and parsed once.

The caller's process reads and decompresses; blocks of text pass to the workers through a ring of
slots, temporary files that need no shared memory and vanish with their folder.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from dlrm_hybrid.data import reader
from dlrm_hybrid.data.parser import BadRow, column_name, parse
from dlrm_hybrid.data.spill import Segment, Spill, joined, opened, read_at, write_at
from dlrm_hybrid.data.workers import Report, Workers
from dlrm_hybrid.types import DataError

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
