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
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ExitCode

SEED = 0
DENSITIES = (0.1, 0.01, 0.001)
SHIFT = 61  # elements between the numbers of two turns

Float32s = NDArray[np.float32]
Calls = Mapping[str, Callable[[], object]]
"""Contestants by name."""
Cell = str | int | float | None
Row = Mapping[str, Cell]
Case = TypeVar("Case")
Start = Callable[[Sequence[str]], None]
"""Runs a program with arguments, and waits for its end."""


def arguments(
    about: str | None, *what: str, runs: bool = False, repeats: int = 5
) -> argparse.ArgumentParser:
    """What every benchmark takes: `--repeats` and `--output`; each may be declared anew.

    Args:
        about: the docstring of its file.
        what: the words of which the first argument is one; none for no such argument.
        runs: whether it trains in a folder that is named then.
        repeats: of each measurement, by default.
    """
    parser = argparse.ArgumentParser(
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        conflict_handler="resolve",
    )
    if what:
        parser.add_argument("what", choices=what)
    if runs:
        parser.add_argument("runs", type=Path, help="folder of the runs")
    text = f"turns, or runs of each measurement; default {repeats}"
    parser.add_argument("--repeats", type=int, default=repeats, help=text)
    parser.add_argument("--output", type=Path, help="also write the page to this Markdown file")
    return parser


class Part(NamedTuple):
    """A table, and a paragraph below it."""

    rows: Sequence[Row]
    text: str


Page = Mapping[str, Sequence[Row] | Part]
"""Tables by heading; the first one's is the title of the page."""


def publish(
    measure: Callable[[], Page], output: Path | None = None, *, compiles: bool = False
) -> None:
    """Print a page of what is measured now, and write it to a file.

    At its head are the machine as it was before and the command that was typed, at its end the load
    after it.

    Args:
        measure: makes the tables.
        output: a Markdown file; None for none.
        compiles: compile all kernels before, so that nothing measured here is a compiler.
    """
    if compiles:
        run(["dlrm_hybrid", "doctor", "doctor.action=compile"])
    facts = "".join(f"- {name}: {value}\n" for name, value in describe().facts().items())
    parts: list[str] = []
    for heading, part in measure().items():
        head = f"## {heading}\n" if parts else f"# {heading}\n\n```\n{command()}\n```\n\n{facts}"
        rows, text = part if isinstance(part, Part) else (part, "")
        parts.append("\n".join([head, table(rows), *([f"{text.strip()}\n"] if text else [])]))
    page = "\n".join([*parts, load()]) + "\n"
    print(page)
    if output is not None:
        output.write_text(page, encoding="utf-8")


def command() -> str:
    """The command that was typed, run from the root of the repository."""
    script = Path(sys.argv[0]).resolve()
    return shlex.join(["python", os.path.relpath(script, script.parents[2]), *sys.argv[1:]])


def run_verb(arguments: Sequence[str]) -> None:
    """Run this program, which prints to standard error, as a process of its own."""
    argv = [sys.executable, "-m", "dlrm_hybrid", *arguments]
    subprocess.run(argv, check=True, stdout=sys.stderr)


OURS: Start = run_verb


def train_once(folder: Path, *overrides: str, start: Start = OURS) -> Run:
    """The run in a folder, trained now unless it is complete there.

    So a broken measurement goes on where it was.

    Args:
        folder: of the run; one that was broken off is removed.
        overrides: of the run.
        start: trains it.
    """
    if is_run(folder):
        if (found := read_run(folder)).status == COMPLETE:
            return found
        shutil.rmtree(folder)
    start(["train", *overrides, f"hydra.run.dir={folder}"])
    return read_run(folder)


def train_unless_diverged(folder: Path, *overrides: str) -> Run | None:
    """The run in a folder as from `train_once`, None if it diverges or did before.

    Raises:
        SystemExit: it failed otherwise; it has said on standard error why.
    """
    if is_run(folder) and read_run(folder).status == "diverged":
        return None
    try:
        return train_once(folder, *overrides)
    except subprocess.CalledProcessError as failure:
        if failure.returncode != ExitCode.DIVERGED:
            sys.exit(f"{folder}: exit code {failure.returncode}")
    return None


def samples_of(run: Run) -> float:
    """Rows of all trainers in the steps that are timed."""
    return run.summary["samples_per_second"] * run.summary["seconds"]


def ranks_of(run: Run) -> list[Mapping[str, Any]]:
    """What each rank of a run has told at its end."""
    return [event.values for event in run.events if event.kind is Kind.RANK]


def silent(*_: object) -> None:
    """Progress that nobody sees."""


def slug(name: str) -> str:
    """The name of something as that of a folder: letters, digits, points and dashes."""
    return re.sub(r"[^\w.]+", "-", name).strip("-").lower()


def load() -> str:
    """A sentence on the load of this machine."""
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


def ratio(turns: Sequence[Mapping[str, float]], above: str, below: str) -> float:
    """The median of a ratio that is taken turn by turn."""
    return median(one[above] / one[below] for one in turns)


def microseconds(turns: Sequence[Mapping[str, float]], name: str) -> float:
    """The median time of one contestant."""
    return 1e6 * median(one[name] for one in turns)


def reached(is_so: bool | None) -> str | None:
    """Whether a goal was reached, None where there is none."""
    return None if is_so is None else "yes" if is_so else "no"


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
