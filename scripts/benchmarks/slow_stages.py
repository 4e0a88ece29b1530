"""Stages of a pipeline that are slow at random moments: simulated, and stopped by signals.

As in table 2 of the DSP paper: in each batch each stage takes so many percent longer with a
probability of one third (the paper's text lacks that number; its values fit one third).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.parallel.schedule import Pipeline
from dlrm_hybrid.parallel.step import train_step
from dlrm_hybrid.parallel.sync.lockstep import Lockstep
from dlrm_hybrid.plan.simulation.machine import NOW, Hosts, Machine, MessageCosts, Program, Rank
from dlrm_hybrid.plan.simulation.parts import (
    ClientCosts,
    CutCosts,
    PlannedBoundaries,
    PlannedClient,
    PlannedInputs,
    PlannedStage,
    PlannedWorker,
)
from dlrm_hybrid.report.runs import read_run
from dlrm_hybrid.telemetry.events import Kind, read
from dlrm_hybrid.types import Tick

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

    The step of training runs as it is, each stage on a machine of its own.

    Args:
        pipeline: of the stages.
        slow_percent: how much longer a slow batch takes.
        seed: of the moments.
    """
    each = tuple(range(STAGES))
    hosts = Hosts(machine=each, host=each, cores=1, bytes_per_second=None)
    machine = Machine(hosts, MessageCosts(carry=0.0, carry_byte=0.0))
    slow = np.random.default_rng(seed).random((STAGES, BATCHES)) < PROBABILITY
    paces = 1 + slow * slow_percent / 100
    ends = dict.fromkeys(each, (0.0, 0.0))

    def program(rank: Rank) -> Program:
        worker = _worker(rank, pipeline)
        first = 0.0
        for step in range(BATCHES):
            if step == SKIPPED:
                first = yield NOW
            worker.stage.pace = float(paces[rank.rank, step])
            yield from train_step(worker, Tick(step), PlannedInputs())
        ends[rank.rank] = first, (yield NOW)

    machine.run({rank.rank: program(rank) for rank in machine.ranks}, each)
    first, last = ends[0]
    return (BATCHES - SKIPPED) / (last - first)


def _worker(rank: Rank, pipeline: Pipeline) -> PlannedWorker:
    """One whose batch takes a second, and nothing else any time."""
    spec = ModelSpec(embedding_dim=2, bottom=(2, 2, 2), top=(2, 1), table_rows=(2,))
    part = Partition.of(spec, ("bottom.1", "top.1")).stages[rank.rank]
    free = CutCosts(forward_bytes=0.0, backward_bytes=0.0, encode=0.0, decode=0.0)
    microbatches = pipeline.microbatches
    return PlannedWorker(
        part=part,
        pipeline=pipeline,
        stage=PlannedStage(
            rank=rank,
            microbatches=microbatches,
            batch_rows=microbatches,
            seconds=1.0 / microbatches,
        ),
        boundaries=PlannedBoundaries(
            rank=rank,
            stage=rank.rank,
            before=None if part.is_first else free,
            after=None if part.is_last else free,
        ),
        tables=None,
        client=PlannedClient(
            rank=rank,
            trainer=0,
            policy=Lockstep(),
            costs=ClientCosts(push_bytes={}, encode=0.0, apply=0.0),
        ),
    )


def train_slowly(folder: Path, slow_percent: float, *overrides: str) -> None:
    """Train, with every worker stopped at times from its first step to the end of the run.

    In each slot of time each of them is slow with the probability of the paper, and then stopped
    for as much of it as makes its work take so many percent longer.

    Raises:
        SystemExit: the run failed; it has said on standard error why.
    """
    argv = [sys.executable, "-m", "dlrm_hybrid", "train", *overrides, f"hydra.run.dir={folder}"]
    process = subprocess.Popen(argv, stdout=sys.stderr)
    record = folder / "events.jsonl"
    while process.poll() is None and not _has_begun(record):
        time.sleep(0.05)
    share = slow_percent / (100 + slow_percent)
    pids = [int(one.read_text()) for one in sorted((folder / "log").glob("worker-*.pid"))]
    threads = [
        threading.Thread(target=_slow_down, args=(process, pid, share, seed))
        for seed, pid in enumerate(pids)
    ]
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:
        thread.join()
    if code:
        sys.exit(f"{folder}: exit code {code}")


def rate_of(folder: Path) -> float:
    """Samples per second in the middle of a run, by the clock of its record."""
    points = [one for one in read_run(folder).events if one.kind is Kind.PROGRESS]
    first, last = (points[round(part * (len(points) - 1))] for part in MIDDLE)
    samples = last.values["samples"] - first.values["samples"]
    return samples / (last.time_seconds - first.time_seconds)


def _has_begun(record: Path) -> bool:
    return record.exists() and any(one.kind is Kind.PROGRESS for one in read(record))


def _slow_down(process: subprocess.Popen[bytes], pid: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    while process.poll() is None:
        stopped = share * SLOT_SECONDS if random.random() < PROBABILITY else 0.0
        try:
            if stopped:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(stopped)
            os.kill(pid, signal.SIGCONT)
        except ProcessLookupError:
            return
        time.sleep(SLOT_SECONDS - stopped)
