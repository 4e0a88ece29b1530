"""Pipeline stages that are slow at random moments: simulated, or real ones stopped by signals.

As in table 2 of the DSP paper, each stage takes some percent longer in a batch with a probability
of one third (the paper's text lacks that number; its values fit one third).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from harness import Start, middle

from dlrm_hybrid.parallel.schedule import Op, Pipeline
from dlrm_hybrid.plan.simulation import FORWARD_SHARE
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.events import Kind, read

SLOW_PERCENT = (20, 50, 100, 150)
PROBABILITY = 1 / 3
PAPER: Mapping[str, Sequence[float]] = {
    "features replay": (8.977, 28.52, 97.06, 359.2),
    "dsp 4,2,0": (6.017, 16.14, 37.44, 70.99),
    "dsp 6,3,0": (7.465, 16.01, 36.57, 54.57),
    "dsp 10,5,0": (7.391, 18.15, 32.10, 53.42),
}
STAGES = 3
BATCHES, SKIPPED = 1500, 100
SLOT_SECONDS = 0.05  # about a batch, and of several turns of a scheduler
MIDDLE = (0.2, 0.9)  # of a run


def simulated(pipeline: Pipeline, slow_percent: float, seed: int = 0) -> float:
    """Batches in the time that one takes in one stage, all alike, messages taking none.

    A stage does the ops of a tick in their order, each once what it needs has come.

    Args:
        pipeline: of the stages.
        slow_percent: how much longer a slow batch takes.
        seed: of the moments.
    """
    slow = np.random.default_rng(seed).random((STAGES, BATCHES)) < PROBABILITY
    paces = 1 + slow * slow_percent / 100
    ends: dict[tuple[str, int, int, int], float] = {}  # by kind, stage, batch and micro-batch
    todo = [
        [(tick, op) for tick in range(BATCHES) for op in ops if tick >= op.delay]
        for ops in pipeline.ops
    ]
    free, starts = [0.0] * STAGES, dict[int, float]()
    while any(todo):
        for stage, ops in enumerate(todo):
            while ops:
                tick, op = ops[0]
                needed = _needed(op, stage, tick - op.delay)
                if needed is not None and needed not in ends:
                    break
                ops.pop(0)
                if stage == 0 and tick not in starts:
                    starts[tick] = free[0]
                begin = max(free[stage], 0.0 if needed is None else ends[needed])
                seconds = _share(pipeline, stage, op) * paces[stage, tick] / pipeline.microbatches
                free[stage] = begin + seconds
                ends[op.kind, stage, tick - op.delay, op.microbatch] = free[stage]
    return (BATCHES - SKIPPED) / (free[0] - starts[SKIPPED])


def _needed(op: Op, stage: int, batch: int) -> tuple[str, int, int, int] | None:
    """Of another stage, or of the last one's own forward."""
    if op.kind == "F":
        return None if stage == 0 else ("F", stage - 1, batch, op.microbatch)
    if stage == STAGES - 1:
        return "F", stage, batch, op.microbatch
    return "B", stage + 1, batch, op.microbatch


def _share(pipeline: Pipeline, stage: int, op: Op) -> float:
    """Of the time of a batch; backward computes forward again if that was in another tick."""
    if op.kind == "F":
        return FORWARD_SHARE
    again = op.delay != pipeline.delay(stage, "F", op.microbatch)
    return 1 - FORWARD_SHARE + again * FORWARD_SHARE


def with_slow_stages(slow_percent: float) -> Start:
    """Train, with every worker stopped at times from its first step to the end of the run.

    In each slot of time each of them is slow with the probability of the paper, and then stopped
    for as much of it as makes its work take so many percent longer.
    """
    stopped = SLOT_SECONDS * slow_percent / (100 + slow_percent)
    return slowed(
        "worker-*", SLOT_SECONDS, lambda random: stopped * (random.random() < PROBABILITY)
    )


def slowed(
    ranks: str, slot_seconds: float, stopped_seconds: Callable[[np.random.Generator], float]
) -> Start:
    """Train, with some ranks stopped by signals from the first step to the end of the run.

    Args:
        ranks: pattern of their names.
        slot_seconds: in each such slot each of them is stopped anew.
        stopped_seconds: for how much of it.
    """

    def start(arguments: Sequence[str]) -> None:
        argv = [sys.executable, "-m", "dlrm_hybrid", *arguments]
        folder = Path(arguments[-1].partition("=")[2])
        process = subprocess.Popen(argv, stdout=sys.stderr)
        while process.poll() is None and not _has_begun(folder / "events.jsonl"):
            time.sleep(0.05)
        pids = [int(one.read_text()) for one in sorted((folder / "log").glob(f"{ranks}.pid"))]
        given = (slot_seconds, stopped_seconds)
        threads = [
            threading.Thread(
                target=_slow_down, args=(process, pid, np.random.default_rng(k), *given)
            )
            for k, pid in enumerate(pids)
        ]
        for thread in threads:
            thread.start()
        code = process.wait()
        for thread in threads:
            thread.join()
        if code:
            sys.exit(f"{folder}: exit code {code}")

    return start


def rate_of(run: Run) -> float:
    """Samples per second in the middle of a run, by the clock of its record."""
    first, last = middle(run, MIDDLE)
    samples = last.values["samples"] - first.values["samples"]
    return samples / (last.time_seconds - first.time_seconds)


def _has_begun(record: Path) -> bool:
    return record.exists() and any(one.kind is Kind.PROGRESS for one in read(record))


def _slow_down(
    process: subprocess.Popen[bytes],
    pid: int,
    random: np.random.Generator,
    slot_seconds: float,
    stopped_seconds: Callable[[np.random.Generator], float],
) -> None:
    while process.poll() is None:
        stopped = stopped_seconds(random)
        try:
            if stopped:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        time.sleep(slot_seconds - stopped)
