"""Kills ranks, and the supervisor, at random steps; compares with an undisturbed run.

    python scripts/faults/kill_ranks.py FOLDER --runs 30 --kills 4 --seed 0
    python scripts/faults/kill_ranks.py FOLDER --runs 25 --kills 4 --parallel single
    python scripts/faults/kill_ranks.py FOLDER --runs 25 --kills 4 --parallel served

Each run draws its method, and the roles and steps of its kills. After the loss of a rank it must
recover by itself; after that of the supervisor no process may be left, and it is started again.
Prints Markdown tables; exit code 1 if a run hung, left a process, or ended with another result.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from fault_runs import HangError, Program, arguments, digest, send, start, unharmed, wait_gone

from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold
from dlrm_hybrid.telemetry.events import Event, Kind

SUPERVISOR = "supervisor"
WORLDS = {
    "single": ("parallel=single",),
    "hybrid": ("parallel=hybrid",),
    "served": (
        *("parallel=hybrid", "parallel.cuts=[top.1]", "embedding=served"),
        *("parallel.table_servers=2", "embedding.staleness=3"),
    ),
}
# Every kind of rank has the same chance, whatever their number.
ROLES = {
    "single": (("worker-0",),),
    "hybrid": (
        *(("worker-0.0", "worker-1.0"), ("worker-0.1", "worker-1.1"), ("worker-0.2", "worker-1.2")),
        *(("server-0",), (SUPERVISOR,)),
    ),
    "served": (
        *(("worker-0.0", "worker-1.0"), ("worker-0.1", "worker-1.1"), ("server-0",)),
        *(("tables-0", "tables-1"), (SUPERVISOR,)),
    ),
}
METHODS = {
    "single": ("none",),
    "hybrid": ("none", "dct", "topk"),
    "served": ("none", "dct"),
}
GONE_SECONDS = 60.0


@dataclass(slots=True)
class Told:
    """What became of one run.

    Attributes:
        kills: role and step.
        restart_seconds: from each kill to the first event after it.
        faults: what must not happen.
    """

    kills: list[str] = field(default_factory=list[str])
    restart_seconds: list[float] = field(default_factory=list[float])
    faults: list[str] = field(default_factory=list[str])


def main() -> None:
    """Make the runs, print the table."""
    parser = arguments(__doc__, runs=4, kills=3, steps=100, seed=0)
    parser.add_argument("--parallel", choices=tuple(ROLES), default="hybrid")
    options = parser.parse_args()
    draw = np.random.default_rng(fold(options.seed, "kills"))
    kills: int = options.kills
    rows: list[list[str]] = []
    struck: Counter[str] = Counter()
    unbroken: dict[str, str] = {}
    failed = False
    for number in range(options.runs):
        method = str(draw.choice(METHODS[options.parallel]))
        given = [*WORLDS[options.parallel], f"gradient={method}"]
        given += [f"train.steps={options.steps}", "train.epochs=100", "checkpoint.every=7"]
        if method not in unbroken:
            whole = options.folder / f"unbroken-{options.parallel}-{method}"
            unbroken[method] = _unbroken(whole, given, options.steps)
        roles = _drawn(draw, ROLES[options.parallel], kills)
        steps = sorted(draw.integers(1, options.steps, kills).tolist())
        folder = options.folder / f"{options.parallel}-{options.seed}-{number}"
        told = _harmed(folder, given, list(zip(roles, steps, strict=True)))
        if not told.faults and digest(folder, options.steps) != unbroken[method]:
            told.faults.append("other weights")
        failed |= bool(told.faults)
        struck.update(kill.partition(" ")[0] for kill in told.kills)
        slowest = max(told.restart_seconds, default=0.0)
        end = "; ".join(told.faults) or "equal"
        rows.append([str(number), method, ", ".join(told.kills), f"{slowest:.1f}", end])
        print("|".join(rows[-1]), file=sys.stderr)
    columns = ("run", "method", "killed at step", "slowest restart, s", "weights")
    print(Table(columns, rows, "rllrl").markdown())
    killed = [[role, str(count)] for role, count in sorted(struck.items())]
    print(Table(("role", "kills"), killed, "lr").markdown(), end="")
    sys.exit(failed)


def _drawn(draw: np.random.Generator, kinds: Sequence[Sequence[str]], kills: int) -> list[str]:
    chosen = [kinds[int(kind)] for kind in draw.integers(len(kinds), size=kills)]
    return [str(draw.choice(kind)) for kind in chosen]


def _unbroken(folder: Path, given: list[str], steps: int) -> str:
    world = [] if given[0] == "parallel=single" else ["parallel.world=in_process"]
    return digest(unharmed(folder, [*given, *world]), steps)


def _harmed(folder: Path, given: list[str], kills: list[tuple[str, int]]) -> Told:
    told = Told()
    given = [*given, f"checkpoint.max_restarts={len(kills)}"]
    program = start(folder, given)
    try:
        for role, step in kills:
            record = program.wait_for(len(told.kills) + 1, step)
            if program.process.poll() is not None:
                break  # it came to its end first
            try:
                struck = _kill(program, role, told)
            except ProcessLookupError:
                break  # it has come to its end since
            told.kills.append(f"{role} {record[-1].step}")
            if role == SUPERVISOR:
                program = start(folder, [*given, "checkpoint.resume=auto"])
            begun = _begun(program.wait_for(len(told.kills) + 1, 0))
            if len(begun) > len(told.kills):
                told.restart_seconds.append(begun[-1].time_seconds - struck)
        if program.end():
            told.faults.append(f"exit code {program.process.returncode}")
    except HangError as error:
        told.faults.append(str(error))
    told.faults += [f"left: {pid}" for pid in wait_gone(list(program.pids().values()), 0.0)]
    return told


def _kill(program: Program, role: str, told: Told) -> float:
    pids = program.pids()
    if role != SUPERVISOR:
        return send(pids[role], signal.SIGKILL)
    program.process.kill()
    program.process.wait()
    struck = time.time()
    told.faults += [f"left: {pid}" for pid in wait_gone(list(pids.values()), GONE_SECONDS)]
    return struck


def _begun(record: list[Event]) -> list[Event]:
    return [event for event in record if event.kind is Kind.STARTED]


if __name__ == "__main__":
    main()
