"""Sends SIGTERM in every phase of a run: each time it must save, exit 75 and lose no step.

    python scripts/faults/terminate.py FOLDER --each 20 --seed 0
    python scripts/faults/terminate.py FOLDER --each 5 --phases saving evaluation
    python scripts/faults/terminate.py FOLDER --each 20 --group
    python scripts/faults/terminate.py FOLDER --each 20 parallel.trainers=1 parallel.cuts=[bottom.1]

The moment within a phase is random; the phase is read from the record and the folder just before
the signal, and a moment that has missed its phase is drawn again. With --group the signal goes to
all processes of the program's group, as `timeout`, systemd and SLURM send it. Every run is started
again until it is complete, and compared with an undisturbed one. Prints a Markdown table; exit code
1 if a run did otherwise. Overrides go to every run.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fault_runs import (
    HANG_SECONDS,
    POLL_SECONDS,
    HangError,
    Program,
    arguments,
    digest,
    read,
    send,
    start,
    wait_gone,
)

from dlrm_hybrid.checkpoint.folder import CHECKPOINTS, partial_folders
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.types import ExitCode

EXIT_SECONDS = 10.0
STEPS, SAVE_EVERY, EVALUATE_EVERY = 120, 10, 20
GIVEN = (
    *(f"train.steps={STEPS}", "train.epochs=100"),
    *(f"checkpoint.every={SAVE_EVERY}", f"train.evaluate_every={EVALUATE_EVERY}"),
    "evaluate.batch_size=16",
)
PHASES = (
    *("imports", "prepare", "start", "warm-up", "training", "evaluation", "saving", "closing"),
)
OWN_ROWS = "data.processes=2"  # no other run has prepared them
MOST_TRIES = 5  # for each moment that hits its phase
PHASE_SECONDS = {
    "imports": 0.5,
    "prepare": 1.0,
    "evaluation": 0.3,
    "saving": 0.01,
}  # moments are drawn within so long


def main() -> None:
    """Stop runs, print the table."""
    parser = arguments(__doc__, each=2, seed=0)
    parser.add_argument("--phases", nargs="+", choices=PHASES, default=PHASES)
    parser.add_argument("--group", action="store_true", help="signals go to the process group")
    parser.add_argument("--parallel", choices=("single", "hybrid"), default="hybrid")
    options, overrides = parser.parse_known_args()
    given = [*GIVEN, f"parallel={options.parallel}", *overrides]
    draw = np.random.default_rng(fold(options.seed, "signals"))
    since = time.monotonic()
    whole = options.folder / "whole"
    program = start(whole, given)
    program.wait_for(1, 0)
    start_seconds = time.monotonic() - since
    if program.end():
        raise SystemExit(f"{whole}: the run that nobody has stopped failed")
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    tries = 0
    for wanted in options.phases:
        for _ in range(MOST_TRIES * options.each):
            if len(found[wanted]) >= options.each:
                break
            folder = options.folder / f"stopped-{options.seed}-{tries}"
            tries += 1
            own = [f"data.prepared={folder}-rows", OWN_ROWS] if wanted == "prepare" else []
            program = start(folder, [*given, *own])
            _await(wanted, program, draw, start_seconds)
            try:
                phase, took, fault = _stopped(program, [*given, *own], options.group)
            except HangError as error:
                phase, took, fault = wanted, HANG_SECONDS, str(error)
            if not fault and digest(folder, STEPS) != digest(whole, STEPS):
                fault = "other weights"
            found[phase].append((took, fault))
            print(f"{folder.name}: {phase}, {took:.1f} s {fault}", file=sys.stderr)
    rows = [
        [phase, str(len(ends)), f"{max(took for took, _ in ends):.1f}", _faults(ends)]
        for phase, ends in sorted(found.items())
        if ends
    ]
    columns = ("phase", "signals", "slowest exit, s", "faults")
    print(Table(columns, rows, "lrrl").markdown(), end="")
    missed = any(len(found[phase]) < options.each for phase in options.phases)
    sys.exit(missed or any(fault for ends in found.values() for _, fault in ends))


def _await(wanted: str, program: Program, draw: np.random.Generator, start_seconds: float) -> None:
    """Wait for a moment of a phase."""
    root = program.folder / CHECKPOINTS
    due: Callable[[], bool]
    while program.process.poll() is None and not _heeds_signals(program.process.pid):
        time.sleep(POLL_SECONDS / 10)  # until then there is nothing but the interpreter
    match wanted:
        case "start":
            time.sleep(draw.uniform(0.0, start_seconds))
            return
        case "imports":
            due = lambda: True  # noqa: E731
        case "prepare":
            due = program.folder.exists
        case "closing":
            due = lambda: _is_finished(read(program.folder))  # noqa: E731
        case "warm-up":
            step = int(draw.integers(0, WARMUP_STEPS))
            due = lambda: _step(read(program.folder)) >= step  # noqa: E731
        case "training":
            step = int(draw.integers(WARMUP_STEPS, STEPS))
            due = lambda: _step(read(program.folder)) >= step  # noqa: E731
        case "evaluation":
            step = EVALUATE_EVERY * int(draw.integers(1, STEPS // EVALUATE_EVERY + 1))
            due = lambda: _step(read(program.folder)) >= step  # noqa: E731
        case _:
            step = SAVE_EVERY * int(draw.integers(1, STEPS // SAVE_EVERY))
            due = lambda: any(_saves(root, step))  # noqa: E731
    while program.process.poll() is None and not due():
        time.sleep(POLL_SECONDS / 10)
    time.sleep(draw.uniform(0.0, PHASE_SECONDS.get(wanted, POLL_SECONDS)))


def _heeds_signals(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)


def _is_finished(record: list[Event]) -> bool:
    return any(one.kind is Kind.FINISHED for one in record)


def _saves(root: Path, first_step: int) -> list[Path]:
    """Folders of checkpoints that ranks write now."""
    if not root.exists():
        return []
    found = [(int(one.name.split("_")[1].split(".")[0]), one) for one in partial_folders(root)]
    return [folder for step, folder in found if step >= first_step]


def _step(record: list[Event]) -> int:
    return record[-1].step if record else -1


def _phase(program: Program) -> str:
    """What the run is doing now."""
    record = read(program.folder)
    if program.process.poll() is not None:
        return "end"
    if _is_finished(record):
        return "closing"
    if not program.folder.exists():
        return "imports"
    if not record:
        return "start" if (program.folder / "log").exists() else "prepare"
    if _saves(program.folder / CHECKPOINTS, 0):
        return "saving"
    points = [one.step for one in record if one.kind is Kind.PROGRESS]
    evaluated = [one.step for one in record if one.kind is Kind.EVALUATED]
    if points and points[-1] % EVALUATE_EVERY == 0 and points[-1] not in evaluated:
        return "evaluation"
    return "training" if points and points[-1] >= WARMUP_STEPS else "warm-up"


def _stopped(program: Program, given: list[str], to_group: bool) -> tuple[str, float, str]:
    """The phase in which the signal comes, how long the exit takes, and what is wrong."""
    folder, phase = program.folder, _phase(program)
    if program.process.poll() is not None:
        return "end", 0.0, ""
    sent = time.monotonic()
    if to_group:
        os.killpg(program.process.pid, signal.SIGTERM)
    else:
        send(program.process.pid, signal.SIGTERM)
    code = program.end()
    took = time.monotonic() - sent
    left = wait_gone(list(program.pids().values()), 0.0)
    before = _last_step(read(folder))
    if code not in (ExitCode.PREEMPTED, ExitCode.DONE):
        return phase, took, f"exit code {code}"
    if took > EXIT_SECONDS or left:
        return phase, took, f"{len(left)} processes left, {took:.1f} s"
    if code == ExitCode.PREEMPTED:
        if start(folder, [*given, "checkpoint.resume=auto"]).end():
            return phase, took, "the run did not go on"
        begun = [event for event in read(folder) if event.kind is Kind.STARTED]
        if before is not None and begun[-1].step < before:
            return phase, took, f"went back from step {before} to {begun[-1].step}"
    return phase, took, ""


def _last_step(record: list[Event]) -> int | None:
    steps = [event.step for event in record if event.kind is Kind.PROGRESS]
    return steps[-1] if steps else None


def _faults(ends: list[tuple[float, str]]) -> str:
    return "; ".join(fault for _, fault in ends if fault) or "none"


if __name__ == "__main__":
    main()
