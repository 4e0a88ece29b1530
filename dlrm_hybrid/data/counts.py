"""How many rows each raw file has, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

_MOST_FILES = 8  # of which each has a line


@dataclass(frozen=True, slots=True)
class FileRows:
    """The rows of a raw file.

    Attributes:
        path: of it.
        kept: good rows.
        bad: rows that were left out.
        remark: what looks wrong with its rows, if anything does.
    """

    path: Path
    kept: int = 0
    bad: int = 0
    remark: str = ""

    def with_more(self, kept: int, bad: int, remark: str) -> FileRows:
        """These and more rows; the first remark stays."""
        return replace(
            self, kept=self.kept + kept, bad=self.bad + bad, remark=self.remark or remark
        )


def told(files: Sequence[FileRows]) -> Iterator[str]:
    """A line for each file; of many, a line for their sum and for the first that are unusual."""
    unusual = [one for one in files if one.bad or one.remark or not one.kept]
    shown = files if len(files) <= _MOST_FILES else unusual[:_MOST_FILES]
    for one in shown:
        remark = f"; {one.remark}" if one.remark else ""
        yield f"  {one.path}: {_counts(one.kept, one.bad)}{remark}"
    if len(files) > _MOST_FILES:
        more = len(unusual) - len(shown)
        others = f"; {more:,} more have bad rows or none" if more else ""
        counts = _counts(sum(one.kept for one in files), sum(one.bad for one in files))
        yield f"  {len(files):,} files: {counts}{others}"


def _counts(kept: int, bad: int) -> str:
    return f"{kept + bad:,} rows read, {kept:,} kept, {bad:,} bad"
