"""Raw rows on their way to shards: what each format is given and makes, and what of bad rows."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, final

from dlrm_hybrid.data.arrays import StoredArray
from dlrm_hybrid.data.manifest import Scale, Semantics
from dlrm_hybrid.threads import Threads
from dlrm_hybrid.types import DataError

_MOST_FILES = 8  # of which each has a line

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, what is done and the total: bytes of the raw files for `parse`, columns ×
rows for `vocabulary`, rows for `assemble`; of tables rows for `read`, whose total is not known."""


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
    quarantine: Path | None = None

    def check(self, number: int, where: str) -> None:
        """Raise DataError if bad row `number`, from 1, is one too many; `where` describes it."""
        if self.stop:
            raise DataError(f"{where} (data.on_bad_row=error)")
        if number > self.max_rows:
            raise DataError(f"more than {self.max_rows} bad rows (data.max_bad_rows); {where}")


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a raw file: how many are kept and left out, and what looks wrong with them."""

    path: Path
    kept: int = 0
    bad: int = 0
    remark: str = ""

    @property
    def rows(self) -> int:
        """All of them."""
        return self.kept + self.bad


@final
class RowCounts:
    """Counts the rows of raw files, and puts bad ones aside.

    Args:
        raw: the files.
        policy: what happens to bad rows.

    Attributes:
        files: the rows of each.
        bad: rows left out of all.
    """

    def __init__(self, raw: Sequence[Path], policy: BadRowPolicy) -> None:
        self.files = [FileRows(path) for path in raw]
        self.bad = 0
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
        """Good rows of a file; its first remark stays."""
        counts = self.files[file]
        remark = counts.remark or remark
        self.files[file] = replace(counts, kept=counts.kept + rows, remark=remark)

    def set_aside(self, file: int, where: str, raw: bytes) -> None:
        """A bad row; `where` says which one and what is wrong, behind the name of its file.

        Raises:
            DataError: it is one too many.
        """
        counts = self.files[file]
        self.bad += 1
        self.policy.check(self.bad, f"{counts.path}{where}")
        self.files[file] = replace(counts, bad=counts.bad + 1)
        if self._quarantine:
            self._quarantine.write(f"{counts.path.name}{where}\t".encode() + raw + b"\n")

    def flush(self) -> None:
        """Bring what was put aside to the disk."""
        if self._quarantine:
            self._quarantine.flush()
            os.fsync(self._quarantine.fileno())

    def lines(self) -> Iterator[str]:
        """For each file, for a person; of many, for their sum and for the first unusual ones."""
        unusual = [one for one in self.files if one.bad or one.remark or not one.kept]
        shown = self.files if len(self.files) <= _MOST_FILES else unusual[:_MOST_FILES]
        for counts in shown:
            remark = f"; {counts.remark}" if counts.remark else ""
            yield f"  {counts.path}: {_counts(counts.kept, counts.bad)}{remark}"
        if len(self.files) > _MOST_FILES:
            hidden = len(unusual) - len(shown)
            more = f"; {hidden:,} more have bad rows or none" if hidden else ""
            kept = sum(one.kept for one in self.files)
            yield f"  {len(self.files):,} files: {_counts(kept, self.bad)}{more}"


def _counts(kept: int, bad: int) -> str:
    return f"{kept + bad:,} rows read, {kept:,} kept, {bad:,} bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareJob:
    """Raw files to be prepared.

    Attributes:
        raw: the files.
        num_bytes: of them all.
        semantics: what their rows mean.
        result: the folder that gets arrays and vocabularies.
        spill: a folder for temporary files.
        block_bytes: text parsed at a time.
        threads: that may be used.
        counts: of their rows.
        progress: is called.
        check_unchanged: raises DataError if a file is not what it was at first.
    """

    raw: Sequence[Path]
    num_bytes: int
    semantics: Semantics
    result: Path
    spill: Path
    block_bytes: int
    threads: Threads
    counts: RowCounts
    progress: Progress
    check_unchanged: Callable[[], None]

    def counter(self, stage: str, total: int | None) -> Callable[[int], None]:
        """A function that adds up what is done of a stage, and reports it."""
        done = 0

        def report(more: int) -> None:
            nonlocal done
            done += more
            self.progress(stage, done, total)

        report(0)
        return report


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What was made of raw files; the manifest says what each value is.

    Attributes:
        xxh3: of each raw file.
        rows: to train, validate and test.
    """

    xxh3: Sequence[str]
    rows: tuple[int, int, int]
    arrays: tuple[StoredArray, ...]
    table_rows: tuple[int, ...]
    vocabulary_xxh3: str
    scales: tuple[Scale | None, ...]
    zero_keys: int = 0
