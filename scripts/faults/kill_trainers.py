"""Kills workers of random trainers, or makes them leave, in one run with `parallel.elastic`.

    python scripts/faults/kill_trainers.py FOLDER --kills 100 --leaves 100 --seed 0

In random order; to leave, a worker gets SIGTERM. The others must continue in one attempt, and the
trainer must be back within some seconds; in the end all batches must be learned, none twice because
of leaves, and no process left. Prints a Markdown table; exit code 1 if anything else happened.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

import numpy as np
from fault_runs import HangError, Program, arguments, read, send, start, wait_gone

from dlrm_hybrid.checkpoint.folder import find
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.rng import fold
from dlrm_hybrid.telemetry.events import Event, Kind

TRAINERS, STAGES = 3, 2
WORLD = (
    *("parallel=hybrid", f"parallel.trainers={TRAINERS}", "parallel.cuts=[top.1]", "sync=async"),
    *("embedding=served", "parallel.table_servers=1", "parallel.elastic=true", "gradient=dct"),
)
GOAL_SECONDS = 5.0
BACK_SECONDS = 60.0
POLL_SECONDS = 0.02


KILL, LEAVE = "kills", "leaves"
SIGNALS = {KILL: signal.SIGKILL, LEAVE: signal.SIGTERM}


@final
@dataclass(frozen=True, slots=True)
class Away:
    """When a trainer was not there, by the clock on the wall."""

    how: str
    trainer: int
    begin: float
    end: float

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end - self.begin


@final
@dataclass(slots=True)
class Strikes:
    """What was done to a run.

    Attributes:
        away: of each trainer that was struck and has come again.
        struck: how often each was done; the run may end before the last has come again.
        faults: what was not as it must be.
        pids: of all ranks that were seen.
    """

    away: list[Away] = field(default_factory=list[Away])
    struck: Counter[str] = field(default_factory=Counter[str])
    faults: list[str] = field(default_factory=list[str])
    pids: set[int] = field(default_factory=set[int])

    def count(self, how: str) -> int:
        """How often."""
        return sum(one.how == how for one in self.away)


def main() -> None:
    """Make the run, print the table."""
    options = arguments(__doc__, kills=3, leaves=0, steps=0, seed=0).parse_args()
    kills: int = options.kills
    hows = [KILL] * kills + [LEAVE] * options.leaves
    steps = options.steps or 100 + 400 * len(hows)
    given = [*WORLD, f"train.steps={steps}", "train.epochs=1000000", "checkpoint.every=150"]
    given += ["train.evaluate_every=200", f"checkpoint.max_restarts={kills}", "telemetry.every=10"]
    draw = np.random.default_rng(fold(options.seed, "trainers"))
    program = start(options.folder / "run", given)
    strikes = Strikes()
    try:
        program.wait_for(1, 10)
        for index in draw.permutation(len(hows)):
            time.sleep(float(draw.uniform(0.0, 1.0)))
            worker = int(draw.integers(TRAINERS)), int(draw.integers(STAGES))
            if not _struck(program, hows[index], *worker, strikes):
                break
        if program.end():
            strikes.faults.append(f"exit code {program.process.returncode}")
        strikes.faults += _checked(program, steps, strikes)
    except HangError as error:
        strikes.faults.append(str(error))
    strikes.faults += [f"left: {pid}" for pid in wait_gone(sorted(strikes.pids), 0.0)]
    if max((one.seconds for one in strikes.away), default=0.0) > GOAL_SECONDS:
        strikes.faults.append(f"slower than {GOAL_SECONDS:g} s")
    _print(read(program.folder), strikes)
    sys.exit(bool(strikes.faults) or len(strikes.away) < len(hows))


def _struck(program: Program, how: str, trainer: int, stage: int, strikes: Strikes) -> bool:
    """Strike a rank and wait until its trainer computes again; False where the run has ended."""
    role = f"worker-{trainer}.{stage}"
    before, pids = _started(program, role), program.pids()
    strikes.pids.update(pids.values())
    try:
        struck = send(pids[role], SIGNALS[how])
    except ProcessLookupError:
        return False
    strikes.struck[how] += 1
    while time.time() - struck < BACK_SECONDS:
        if program.process.poll() is not None:
            return False
        if _started(program, role) > before:
            strikes.away.append(Away(how, trainer, struck, time.time()))
            return True
        time.sleep(POLL_SECONDS)
    strikes.faults.append(f"{role}: not back in {BACK_SECONDS:g} s")
    return False


def _started(program: Program, role: str) -> int:
    """How often a worker that had been started again has said that it computes."""
    text = (program.folder / "log" / f"{role}.log").read_text(encoding="utf-8")
    return text.count("goes on at batch")


def _checked(program: Program, steps: int, strikes: Strikes) -> list[str]:
    strikes.pids.update(program.pids().values())
    record = read(program.folder)
    faults: list[str] = []
    if sum(event.kind is Kind.STARTED for event in record) != 1:
        faults.append("more than one attempt")
    manifest = json.loads((find(program.folder) / "manifest.json").read_text(encoding="utf-8"))
    learned = sum(manifest["progress"]["batches"])
    if learned != steps * TRAINERS:
        faults.append(f"{learned} batches learned of {steps * TRAINERS}")
    for how, name in ((KILL, "lost_trainers"), (LEAVE, "left_trainers")):
        found = [event.values[name] for event in record if event.kind is Kind.FINISHED]
        if not all(strikes.count(how) <= one <= strikes.struck[how] for one in found):
            faults.append(f"{name} by the leader's count: {found}")
    if not strikes.struck[KILL] and _redone(record):
        faults.append(f"{_redone(record)} batches given out again")
    return faults


def _redone(record: Sequence[Event]) -> int:
    values = [event.values for event in record if event.kind is Kind.FINISHED]
    return values[-1]["redone_batches"] if values else -1


def _rates(record: Sequence[Event], away: Sequence[Away]) -> tuple[float, float]:
    """Batches per second of a trainer that is there: while another is away, and else."""
    points = [
        (one.time_seconds, one.values["batches"]) for one in record if one.kind is Kind.PROGRESS
    ]
    batches = [0.0, 0.0]
    seconds = [0.0, 0.0]
    for (begin, before), (end, after) in zip(points, points[1:], strict=False):
        gone = {one.trainer for one in away if one.begin < end and begin < one.end}
        here = [trainer for trainer in range(TRAINERS) if trainer not in gone]
        seconds[not gone] += (end - begin) * len(here)
        batches[not gone] += sum(after[one] - before[one] for one in here)
    rates = [count / time if time else 0.0 for count, time in zip(batches, seconds, strict=True)]
    return rates[0], rates[1]


def _print(record: Sequence[Event], strikes: Strikes) -> None:
    rows: list[list[str]] = []
    for how in (KILL, LEAVE):
        away = [one for one in strikes.away if one.how == how]
        if away:
            seconds = [one.seconds for one in away]
            rates = [f"{rate:.0f}" for rate in _rates(record, away)]
            back = [f"{value:.1f}" for value in (np.median(seconds), max(seconds))]
            rows.append([f"{len(away)} {how}", *back, *rates])
    columns = (
        *("strikes", "median until back, s", "longest, s"),
        *("batches/s of each other trainer meanwhile", "at other times"),
    )
    print(Table(columns, rows, "rrrrr").markdown(), end="")
    end = "; ".join(strikes.faults) or "all learned"
    print(f"\nbatches given out again: {_redone(record)}; {end}")


if __name__ == "__main__":
    main()
