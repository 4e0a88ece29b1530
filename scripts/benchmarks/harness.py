"""Shared code of the benchmarks: arguments, clocks, and results as a page of Markdown."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.run import training
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.machine import Machine, describe
from dlrm_hybrid.telemetry.summary import COMPLETE

SEED = 0
DENSITIES = (0.1, 0.01, 0.001)
SHIFT = 61  # elements between the numbers of two turns

Float32s = NDArray[np.float32]
Calls = Mapping[str, Callable[[], object]]
"""Contestants by name."""
Cell = str | int | float | None
Row = Mapping[str, Cell]
Case = TypeVar("Case")


def arguments(about: str | None) -> argparse.ArgumentParser:
    """What every benchmark takes: `--repeats` and `--output`.

    Args:
        about: the docstring of its file.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each measurement; default 5")
    parser.add_argument("--output", type=Path, help="also write the page to this Markdown file")
    return parser


def publish(measure: Callable[[Machine, str], str], output: Path | None) -> None:
    """Print the page of a benchmark, and write it to a file.

    Args:
        measure: makes the page, given the machine as it was before and the command that was typed.
        output: a Markdown file; None for none.
    """
    run(
        ["dlrm_hybrid", "doctor", "doctor.action=compile"]
    )  # so that nothing measured is a compiler
    page = measure(describe(), command())
    print(page)
    if output is not None:
        output.write_text(page, encoding="utf-8")


def command() -> str:
    """The command that was typed, run from the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    return shlex.join(["python", os.path.relpath(script, script.parents[2]), *sys.argv[1:]])


def train_once(folder: Path, *overrides: str) -> Run:
    """The run in a folder, trained now unless it is complete there.

    So a broken measurement goes on where it was. What the run says goes to standard error.

    Args:
        folder: of the run; one that was broken off is removed.
        overrides: of the run.
    """
    if is_run(folder):
        if (found := read_run(folder)).status == COMPLETE:
            return found
        shutil.rmtree(folder)
    argv = [sys.executable, "-m", "dlrm_hybrid", "train", *overrides, f"hydra.run.dir={folder}"]
    subprocess.run(argv, check=True, stdout=sys.stderr)
    return read_run(folder)


def told_by_ranks(rank: str, folder: Path, overrides: Sequence[str]) -> list[Mapping[str, Any]]:
    """What the ranks of a run tell at its end, with another body than theirs.

    Args:
        rank: the body, as "module:function".
        folder: of the run.
        overrides: of the run.

    Raises:
        SystemExit: with the code of a run that fails.
    """
    training.TRAIN_RANK = rank
    if code := run([sys.argv[0], "train", f"hydra.run.dir={folder}", *overrides]):
        sys.exit(code)
    return [one.values for one in events.read(folder / "events.jsonl") if one.kind is Kind.RANK]


def slug(name: str) -> str:
    """The name of something as that of a folder: letters, digits, points and dashes."""
    return re.sub(r"[^\w.]+", "-", name).strip("-").lower()


def load() -> str:
    """A sentence on the load of this machine, for the end of a page."""
    return f"Load after it: {' '.join(f'{one:.2f}' for one in os.getloadavg())}."


def each(stage: str, cases: Sequence[Case]) -> Iterable[Case]:
    """All cases, with a bar on standard error that says how far it is."""
    return track(cases, stage, console=Console(stderr=True), transient=True)


@contextmanager
def one_thread() -> Generator[None, None, None]:
    """Torch has one thread inside."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def seconds(call: Callable[[], object], times: int = 1) -> float:
    """CPU seconds of one call in this thread, the mean of several."""
    start = time.thread_time()
    for _ in range(times):
        call()
    return (time.thread_time() - start) / times


def in_turns(calls: Calls, times: int = 1) -> dict[str, float]:
    """CPU seconds of each call, one after the other."""
    return {name: seconds(call, times) for name, call in calls.items()}


def libraries(magnitudes_N: Float32s, k: int) -> Calls:
    """Ways in which libraries find the magnitude that `k` of N elements reach."""
    magnitudes, rank = torch.from_numpy(magnitudes_N), magnitudes_N.size - k
    return {
        "topk": lambda: torch.topk(magnitudes, k, sorted=False),
        "kthvalue": lambda: torch.kthvalue(magnitudes, rank + 1),
        "partition": lambda: np.partition(magnitudes_N, rank),
    }


def ratio(turns: Sequence[Mapping[str, float]], above: str, below: str) -> float:
    """The median of a ratio that is taken turn by turn."""
    return median(one[above] / one[below] for one in turns)


def microseconds(turns: Sequence[Mapping[str, float]], name: str) -> float:
    """The median time of one contestant."""
    return 1e6 * median(one[name] for one in turns)


def reached(is_so: bool | None) -> str | None:
    """Whether a goal was reached, None where there is none."""
    return None if is_so is None else "yes" if is_so else "no"


def render(title: str, machine: Machine, command: str, rows: Sequence[Row]) -> str:
    """A whole page: title, machine, command, and one table; `section` adds more to it.

    Raises:
        ValueError: there are no rows, or two rows have different columns.
    """
    facts = "\n".join(f"- {name}: {value}" for name, value in machine.facts().items())
    return f"# {title}\n\n```\n{command}\n```\n\n{facts}\n\n{table(rows)}"


def section(heading: str, rows: Sequence[Row], text: str = "") -> str:
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
    texts = [any(isinstance(row[column], str) for row in rows) for column in columns]
    return Table(columns, cells, "".join("l" if text else "r" for text in texts)).markdown()


def spread(values: Sequence[float], digits: int) -> str:
    """`median (lowest – highest)` of repeats, with `digits` after the point."""
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:,.{digits}f} ({low:,.{digits}f} – {high:,.{digits}f})"


def _cell(value: Cell) -> str:
    if value is None:
        return MISSING
    if isinstance(value, str):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
