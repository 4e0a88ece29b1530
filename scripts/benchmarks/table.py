"""Benchmark results as Markdown: what ran, where, a table of figures; and how far a bench is."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TypeVar

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.kernels import ahead
from dlrm_hybrid.run.compiling import compile_ahead
from dlrm_hybrid.telemetry import markdown
from dlrm_hybrid.telemetry.machine import Machine

Cell = str | int | float | None
Row = Mapping[str, Cell]
Case = TypeVar("Case")
# Hears what is being measured, and how much of how much of it is done.
Progress = Callable[[str, float, float], None]


def silent(stage: str, done: float, total: float) -> None:
    """A `Progress` that nobody sees."""


def told(
    stage: str,
    cases: Sequence[Case],
    progress: Progress,
    cost: Callable[[Case], float] = lambda case: 1,
) -> Iterator[Case]:
    """All cases one after the other, telling before each how far it is.

    Args:
        stage: what is measured.
        cases: of it.
        progress: hears of it.
        cost: how long a case takes, in any unit.
    """
    done, total = 0.0, sum(map(cost, cases))
    for case in cases:
        progress(stage, done, total)
        yield case
        done += cost(case)


def arguments(about: str) -> argparse.ArgumentParser:
    """What every benchmark takes: `--repeats` and `--output`."""
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement")
    parser.add_argument("--output", type=Path, help="also write the page to this Markdown file")
    return parser


def publish(measure: Callable[[str], str], output: Path | None) -> None:
    """Print the page of a benchmark, and write it to a file.

    Args:
        measure: makes the page, given the command that was typed.
        output: a Markdown file; None for none.
    """
    compile_ahead(ahead.ALL, Terminal())  # so that nothing measured is a compiler
    words = iter(sys.argv[1:])
    kept = [w for w in words if not (w == "--output" and next(words)) and "--output=" not in w]
    page = measure(shlex.join(["python", sys.argv[0], *kept]))
    print(page)
    if output is not None:
        output.write_text(page, encoding="utf-8")


def render(title: str, machine: Machine, command: str, rows: Sequence[Row]) -> str:
    """A whole page: title, machine, command, and one table; `section` adds more to it.

    Raises:
        ValueError: there are no rows, or two rows have different columns.
    """
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.facts().items())
    return f"# {title}\n\n```\n{command}\n```\n\n{facts}\n\n{table(rows)}"


def section(heading: str, rows: Sequence[Row], text: str) -> str:
    """A further table with its heading and a paragraph below it; starts with an empty line."""
    below = f"\n{text}\n" if text else ""
    return f"\n## {heading}\n\n{table(rows)}{below}"


def table(rows: Sequence[Row]) -> str:
    """A Markdown table; every row has the columns of the first, numbers stand to the right.

    Floats show at least three significant digits, integers groups of three, None a dash.

    Raises:
        ValueError: there are no rows, or two rows have different columns.
    """
    if not rows:
        raise ValueError("a table needs at least one row")
    columns = list(rows[0])
    for number, row in enumerate(rows):
        if list(row) != columns:
            raise ValueError(f"row {number} has the columns {list(row)}, the first row {columns}")
    cells = [[_cell(row[column]) for column in columns] for row in rows]
    is_number = [all(not isinstance(row[column], str) for row in rows) for column in columns]
    return markdown.table(columns, cells, is_number)


def spread(values: Sequence[float], digits: int) -> str:
    """`median (lowest – highest)` of repeats, with `digits` after the point."""
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} – {high:,.{digits}f})"


def _cell(value: Cell) -> str:
    if value is None:
        return markdown.MISSING
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
