"""Cuts a rank's link, or stops the rank: the run must survive it for a while, else end cleanly.

    python scripts/faults/links.py FOLDER --while 5 --patience 60 --last 10
    python scripts/faults/links.py FOLDER --roles server-0 --while 30
    python scripts/faults/links.py FOLDER embedding=served parallel.table_servers=1 --roles tables-0

Each rank has a host of its own in an emulated network (root; iproute2), whose link is taken down in
the middle of training. For each role there are four runs: its link is down for `--while` seconds,
then up; the same with SIGSTOP and SIGCONT; its link stays down; it stays stopped. In the first two
the run must end with the weights of an undisturbed one, without a restart. In the others a rank is
lost after `--last` seconds of silence and nothing is restarted: the run must end with exit code 1
and a message that names the silent rank, and leave no process. Prints a Markdown table; exit code 1
if a run did otherwise. Overrides go to every run.
"""

from __future__ import annotations

import argparse
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fault_runs import (
    HangError,
    Program,
    arguments,
    digest,
    read,
    send,
    start,
    unharmed,
    wait_gone,
)

from dlrm_hybrid.report.table import Table
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.types import ExitCode

ROLES = ("worker-0.0", "worker-0.1", "worker-1.1", "server-0")
STEPS, STRUCK_STEP = 150, 30
WORLD = (
    *("parallel=hybrid", "parallel.cuts=[bottom.1]", "gradient=dct"),
    *(f"train.steps={STEPS}", "train.epochs=100", "checkpoint.every=40"),
)
EMULATED = ("network=emulated", "network.rate=100mbit")
GONE_SECONDS = 5.0
NAMED = re.compile(
    r"(worker|server|tables)-[\d.]+ \(rank \d+\) (is gone|has been stopped|does not answer)"
)
SLACK_SECONDS = 30.0  # of a busy machine, until all have ended


@dataclass(frozen=True, slots=True)
class Fault:
    """What is done to a rank, and taken back.

    Attributes:
        name: for the table.
        begin: is called with the rank's process id.
        end: likewise.
    """

    name: str
    begin: Callable[[int], object]
    end: Callable[[int], object]


@dataclass(frozen=True, slots=True)
class Strike:
    """A run with one fault.

    Attributes:
        folder: of the run.
        role: the rank that is harmed, by name.
        injected: what is done to it.
        overrides: of the run.
    """

    folder: Path
    role: str
    injected: Fault
    overrides: Sequence[str]


def _set_link(pid: int, state: str) -> None:
    inside = ["nsenter", f"--target={pid}", "--net"]
    subprocess.run([*inside, "ip", "link", "set", "eth0", state], check=True)


FAULTS = (
    Fault("link down", lambda pid: _set_link(pid, "down"), lambda pid: _set_link(pid, "up")),
    Fault("stopped", lambda pid: send(pid, signal.SIGSTOP), lambda pid: send(pid, signal.SIGCONT)),
)


def main() -> None:
    """Make the runs, print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--roles", nargs="+", default=ROLES, help="ranks by name")
    parser.add_argument("--faults", nargs="+", choices=[one.name for one in FAULTS])
    parser.add_argument("--while", type=float, default=5.0, dest="seconds")
    parser.add_argument("--patience", type=float, default=60.0, help="where the fault ends")
    parser.add_argument("--last", type=float, default=10.0, help="patience where it does not")
    options, overrides = parser.parse_known_args()
    in_process = (*WORLD, *overrides, "parallel.world=in_process")
    whole = unharmed(options.folder / "whole", in_process)
    rows: list[list[str]] = []
    for role in options.roles:
        for injected in FAULTS:
            if options.faults and injected.name not in options.faults:
                continue
            kind = f"{role}-{injected.name}".replace(" ", "-").replace(".", "-")
            passing = _passing(
                Strike(options.folder / f"{kind}-passing", role, injected, overrides),
                options,
                whole,
            )
            lasting = _lasting(
                Strike(options.folder / f"{kind}-lasting", role, injected, overrides), options
            )
            rows += [[role, *passing], [role, *lasting]]
            print(f"{rows[-2]}\n{rows[-1]}", file=sys.stderr)
    columns = ("rank", "injected fault", "for", "exit code", "seconds", "said", "faults")
    align = "llrrrll"
    print(Table(columns, rows, align).markdown(), end="")
    sys.exit(any(row[-1] != "none" for row in rows))


def _passing(strike: Strike, options: argparse.Namespace, whole: Path) -> list[str]:
    """A fault that is taken back: nobody notices."""
    folder, injected = strike.folder, strike.injected
    seconds: float = options.seconds
    faults: list[str] = []
    struck = time.monotonic()
    try:
        program, pid = _struck(strike, options.patience)
        time.sleep(seconds)
        injected.end(pid)
        struck = time.monotonic()
        code = program.end()
    except HangError as error:
        return [injected.name, f"{seconds:g} s", "–", "–", "–", str(error)]
    took = time.monotonic() - struck
    if code != ExitCode.DONE:
        faults.append(_last_line(folder))
    elif digest(folder, STEPS) != digest(whole, STEPS):
        faults.append("other weights")
    if sum(event.kind is Kind.STARTED for event in read(folder)) != 1:
        faults.append("restarted")
    faults += _left(program)
    return [
        injected.name,
        f"{seconds:g} s",
        str(code),
        f"{took:.0f}",
        "–",
        "; ".join(faults) or "none",
    ]


def _lasting(strike: Strike, options: argparse.Namespace) -> list[str]:
    """A fault that stays: the run ends, and says who it was."""
    folder, injected = strike.folder, strike.injected
    patience: float = options.last
    struck = time.monotonic()
    try:
        program, _ = _struck(strike, patience, "checkpoint.max_restarts=0")
        struck = time.monotonic()
        code = program.end()
    except HangError as error:
        return [injected.name, "good", "–", "–", "–", str(error)]
    took = time.monotonic() - struck
    said, faults = _last_line(folder), _left(program)
    if code != ExitCode.FAILED:
        faults.append("another exit code")
    if not NAMED.match(said):
        faults.append(f"no rank is named: {said}")
    if took > 2 * patience + SLACK_SECONDS:
        faults.append("late")
    shown = said.partition(": ")[0]
    return [injected.name, "good", str(code), f"{took:.0f}", shown, "; ".join(faults) or "none"]


def _struck(strike: Strike, patience: float, *more: str) -> tuple[Program, int]:
    """A run that has come so far, and the rank that is harmed now."""
    given = (*WORLD, *EMULATED, *strike.overrides, f"network.patience_seconds={patience}")
    program = start(strike.folder, [*given, *more])
    program.wait_for(1, STRUCK_STEP)
    pid = program.pids()[strike.role]
    strike.injected.begin(pid)
    return program, pid


def _left(program: Program) -> list[str]:
    pids = list(program.pids().values())
    return [f"left: {pid}" for pid in wait_gone(pids, GONE_SECONDS)]


def _last_line(folder: Path) -> str:
    lines = folder.with_suffix(".txt").read_text(encoding="utf-8").split("\n")
    return next(line for line in reversed(lines) if line.strip())


if __name__ == "__main__":
    main()
