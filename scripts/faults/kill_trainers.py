"""Kills workers of random trainers in one long run with `parallel.elastic`.

    python scripts/faults/kill_trainers.py FOLDER --kills 100 --seed 0

The others must go on, in one attempt, and the trainer must be back within some seconds; all batches
must be learned in the end, and nobody left running. Prints a Markdown table; the exit code is 1 if
anything else happened.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

import numpy as np
from fault_runs import HangError, Program, read, send, start, wait_gone

from dlrm_hybrid.checkpoint.folder import find
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold
from dlrm_hybrid.telemetry.events import Kind

TRAINERS, STAGES = 3, 2
WORLD = (
    *("parallel=hybrid", f"parallel.trainers={TRAINERS}", "parallel.cuts=[top.1]", "sync=async"),
    *("embedding=served", "parallel.table_servers=1", "parallel.elastic=true", "gradient=dct"),
)
GOAL_SECONDS = 5.0
BACK_SECONDS = 60.0
POLL_SECONDS = 0.02


def main() -> None:
    """Make the run, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of the run; it is not removed")
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: as many as the kills need")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kills: int = options.kills
    steps = options.steps or 100 + 400 * kills
    given = [*WORLD, f"train.steps={steps}", "train.epochs=1000000", "checkpoint.every=150"]
    given += ["train.evaluate_every=200", f"checkpoint.max_restarts={kills}", "telemetry.every=10"]
    program = start(options.folder / "run", given)
    draw = np.random.default_rng(fold(options.seed, "trainers"))
    seconds: list[float] = []
    faults: list[str] = []
    try:
        program.wait_for(1, 10)
        for _ in range(kills):
            time.sleep(float(draw.uniform(0.0, 1.0)))
            trainer, stage = int(draw.integers(TRAINERS)), int(draw.integers(STAGES))
            back = _struck(program, f"worker-{trainer}.{stage}", faults)
            if back is None:
                break
            seconds.append(back)
        if program.end():
            faults.append(f"exit code {program.process.returncode}")
        faults += _checked(program, steps, len(seconds))
    except HangError as error:
        faults.append(str(error))
    faults += [f"left: {pid}" for pid in wait_gone(list(program.pids().values()), 0.0)]
    if max(seconds, default=0.0) > GOAL_SECONDS:
        faults.append(f"slower than {GOAL_SECONDS:g} s")
    median = float(np.median(seconds)) if seconds else 0.0
    row = [str(len(seconds)), f"{median:.1f}", f"{max(seconds, default=0.0):.1f}"]
    row += [str(_redone(program)), "; ".join(faults) or "all learned"]
    columns = ("kills", "median until back, s", "longest, s", "batches given out again", "end")
    print(Table(columns, [row], "rrrrl").markdown(), end="")
    sys.exit(bool(faults) or len(seconds) < kills)


def _struck(program: Program, role: str, faults: list[str]) -> float | None:
    """Kill a rank; seconds until its trainer computes again, None where the run has ended."""
    before = _started(program, role)
    try:
        struck = send(program.pids()[role], signal.SIGKILL)
    except ProcessLookupError:
        return None
    while time.time() - struck < BACK_SECONDS:
        if program.process.poll() is not None:
            return None
        if _started(program, role) > before:
            return time.time() - struck
        time.sleep(POLL_SECONDS)
    faults.append(f"{role}: not back in {BACK_SECONDS:g} s")
    return None


def _started(program: Program, role: str) -> int:
    """How often a worker that had been started again has said that it computes."""
    text = (program.folder / "log" / f"{role}.log").read_text(encoding="utf-8")
    return text.count("goes on at batch")


def _checked(program: Program, steps: int, kills: int) -> list[str]:
    record = read(program.folder)
    faults: list[str] = []
    if sum(event.kind is Kind.STARTED for event in record) != 1:
        faults.append("more than one attempt")
    manifest = json.loads((find(program.folder) / "manifest.json").read_text(encoding="utf-8"))
    learned = sum(manifest["progress"]["batches"])
    if learned != steps * TRAINERS:
        faults.append(f"{learned} batches learned of {steps * TRAINERS}")
    lost = [event.values["lost_trainers"] for event in record if event.kind is Kind.FINISHED]
    if lost != [kills]:
        faults.append(f"trainers lost by the leader's count: {lost}")
    return faults


def _redone(program: Program) -> int:
    values = [event.values for event in read(program.folder) if event.kind is Kind.FINISHED]
    return values[-1]["redone_batches"] if values else -1


if __name__ == "__main__":
    main()
