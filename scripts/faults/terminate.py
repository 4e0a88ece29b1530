"""Sends SIGTERM at random moments of a run: each time it must save, exit 75 and lose no step.

    python scripts/faults/terminate.py FOLDER --signals 20 --seed 0

The moments are spread evenly over the time that the whole run takes: its start, steps, evaluations,
saves and end. Every run is started again until it is complete, and compared with the one nobody has
stopped. Prints a Markdown table by phase; the exit code is 1 if something was not as it must be.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from fault_runs import digest, read, send, start, wait_gone

from dlrm_hybrid.rng import fold
from dlrm_hybrid.telemetry import markdown
from dlrm_hybrid.telemetry.events import Event, Kind
from dlrm_hybrid.types import ExitCode

EXIT_SECONDS = 10.0
STEPS = 120
GIVEN = (
    *("parallel=hybrid", f"train.steps={STEPS}", "train.epochs=100", "checkpoint.every=10"),
    *("train.evaluate_every=20", "evaluate.batch_size=16"),
)


def main() -> None:
    """Stop runs, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="for all runs; they are not removed")
    parser.add_argument("--signals", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = np.random.default_rng(fold(options.seed, "signals"))
    since = time.monotonic()
    whole = options.folder / "whole"
    if start(whole, GIVEN).end():
        raise SystemExit(f"{whole}: the run that nobody has stopped failed")
    seconds = time.monotonic() - since
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for number in range(options.signals):
        folder = options.folder / f"stopped-{options.seed}-{number}"
        phase, took, fault = _stopped(folder, draw.uniform(0.0, seconds))
        if not fault and digest(folder, STEPS) != digest(whole, STEPS):
            fault = "other weights"
        found[phase].append((took, fault))
        print(f"{number}: {phase}, {took:.1f} s {fault}", file=sys.stderr)
    rows = [
        [phase, str(len(ends)), f"{max(took for took, _ in ends):.1f}", _faults(ends)]
        for phase, ends in sorted(found.items())
    ]
    columns = ("after", "signals", "slowest exit, s", "faults")
    print(markdown.table(columns, rows, (False, True, True, False)), end="")
    sys.exit(any(fault for ends in found.values() for _, fault in ends))


def _stopped(folder: Path, moment_seconds: float) -> tuple[str, float, str]:
    """The phase in which the signal came, how long the exit took, and what was wrong."""
    program = start(folder, GIVEN)
    time.sleep(moment_seconds)
    record = read(folder)
    phase = record[-1].kind.value if record else "start"
    if program.process.poll() is not None:
        return "end", 0.0, ""
    sent = time.monotonic()
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
        if start(folder, [*GIVEN, "checkpoint.resume=auto"]).end():
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
