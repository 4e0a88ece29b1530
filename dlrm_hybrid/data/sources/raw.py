"""Input and output of each format's preparation, and the handling of bad rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, final

from dlrm_hybrid.data.arrays import StoredArray
from dlrm_hybrid.data.folder import Partial, PrepareOptions
from dlrm_hybrid.data.manifest import Growth, Scale, Vectors
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.threads import Threads
from dlrm_hybrid.types import DataError

_MOST_FILES = 8  # with more, only unusual ones have a line

Progress = Callable[[str, int, int | None], None]
"""Called with stage, amount done and total: bytes of the raw files for `parse`, columns × rows for
`vocabulary`, rows for `assemble` and, for tables, `read`, whose total is None."""


@dataclass(frozen=True, slots=True)
class BadRowPolicy:
    """Policy for bad rows: how many may be left out, and where they go.

    Attributes:
        stop: whether the first one is an error.
        quarantine: file that gets the rows left out, if any.
    """

    stop: bool
    max_rows: int
    quarantine: Path | None = None

    def check(self, number: int, where: str) -> None:
        """Raise DataError if bad row `number`, from 1, is not allowed; `where` describes it."""
        if self.stop:
            raise DataError(f"{where} (data.on_bad_row=error; skip or quarantine goes on)")
        if number > self.max_rows:
            raise DataError(f"more than {self.max_rows} bad rows (data.max_bad_rows); {where}")


@dataclass(frozen=True, slots=True)
class FileRows:
    """Counts of a raw file's kept and bad rows, and a remark on what looks wrong."""

    path: Path
    kept: int = 0
    bad: int = 0
    remark: str = ""

    @property
    def rows(self) -> int:
        """Number of rows that were read, kept and bad ones."""
        return self.kept + self.bad


@final
class RowCounts:
    """Counts the rows of raw files and sets bad ones aside.

    Attributes:
        bad: bad rows of all files.
        remarks: remarks on what looks wrong in all files together.
    """

    def __init__(self, raw: Sequence[Path], policy: BadRowPolicy) -> None:
        self.files = [FileRows(path) for path in raw]
        self.bad = 0
        self.remarks: list[str] = []
        self.policy = policy
        self._quarantine: BinaryIO | None = None

    def __enter__(self) -> RowCounts:
        if self.policy.quarantine:
            self._quarantine = self.policy.quarantine.open("wb")
        return self

    def __exit__(self, *_: object) -> None:
        if self._quarantine:
            self._quarantine.close()

    def keep(self, file: int, rows: int, remark: str = "") -> None:
        """Count good rows of a file; its first remark is kept."""
        counts = self.files[file]
        remark = counts.remark or remark
        self.files[file] = replace(counts, kept=counts.kept + rows, remark=remark)

    def set_aside(self, file: int, where: str, raw: bytes) -> None:
        """Count and quarantine a bad row, at `where` in the file; raises DataError by policy."""
        counts = self.files[file]
        self.bad += 1
        self.policy.check(self.bad, f"{counts.path}{where}")
        self.files[file] = replace(counts, bad=counts.bad + 1)
        if self._quarantine:
            self._quarantine.write(f"{counts.path.name}{where}\t".encode() + raw + b"\n")

    def flush(self) -> None:
        """Flush the quarantined rows to the disk."""
        if self._quarantine:
            self._quarantine.flush()
            os.fsync(self._quarantine.fileno())

    def lines(self) -> Iterator[str]:
        """A line for each file; for many files, for the first unusual ones and the sum."""
        unusual = [file for file in self.files if file.bad or file.remark or not file.kept]
        files = self.files if len(self.files) <= _MOST_FILES else unusual[:_MOST_FILES]
        for counts in files:
            remark = f"; {counts.remark}" if counts.remark else ""
            yield f"  {counts.path}: {_counts(counts.kept, counts.bad)}{remark}"
        if len(self.files) > _MOST_FILES:
            hidden = len(unusual) - len(files)
            tail = f"; {hidden:,} more have bad rows or none" if hidden else ""
            kept = sum(file.kept for file in self.files)
            yield f"  {len(self.files):,} files: {_counts(kept, self.bad)}{tail}"
        yield from (f"  {remark}" for remark in self.remarks)


def _counts(kept: int, bad: int) -> str:
    return f"{kept + bad:,} rows read, {kept:,} kept, {bad:,} bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareJob:
    """Raw files to prepare, and the means to do so.

    Attributes:
        num_bytes: size of all files.
        progress: called with the progress of each stage.
        check_unchanged: raises DataError if a file has changed since the start.
    """

    raw: Sequence[Path]
    num_bytes: int
    options: PrepareOptions
    partial: Partial
    threads: Threads
    counts: RowCounts
    progress: Progress
    check_unchanged: Callable[[], None]

    @property
    def schema(self) -> Schema:
        """The columns of the rows."""
        return self.options.semantics.schema

    @property
    def shares_id(self) -> tuple[bool, ...]:
        """Whether id 0 is all categories without a row of their own, for each categorical column.

        A base decides it: its row 0 has that meaning, or is the row of a category.
        """
        base = self.options.base
        return base.manifest.out_of_vocabulary if base else self.options.semantics.shares_id

    def counter(self, stage: str, total: int | None) -> Callable[[int], None]:
        """A function that adds up the amounts done in a stage and reports their sum."""
        count = 0

        def report(amount: int) -> None:
            nonlocal count
            count += amount
            self.progress(stage, count, total)

        report(0)
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """Result of a preparation; `Manifest` describes the other attributes.

    Attributes:
        xxh3: checksum of each raw file.
        rows: number of training, validation and test rows.
        growth: growth of each categorical column's vocabulary; empty without a base.
    """

    xxh3: Sequence[str]
    rows: tuple[int, int, int]
    arrays: tuple[StoredArray, ...]
    table_rows: tuple[int, ...]
    vocabulary_xxh3: str
    scales: tuple[Scale | None, ...]
    zero_keys: int = 0
    growth: tuple[Growth, ...] = ()
    vectors: tuple[Vectors, ...] = ()
