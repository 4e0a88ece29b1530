"""Measures what slow ranks cost the others: pipeline stages slow at random moments, a slow trainer.

    python scripts/benchmarks/slow_ranks.py simulate       stages, with the step of training itself
    python scripts/benchmarks/slow_ranks.py stages RUNS    real ones, stopped by signals
    python scripts/benchmarks/slow_ranks.py trainer RUNS   one of four, with each policy

Each stage takes some percent longer in a batch with a probability of one third, as in table 2 of
the DSP paper (its text lacks that number; its values fit one third). A slow trainer is stopped for
nine tenths of each second; batches per second are those of the three others together, `kept` is
their rate beside a slow one to that without. Rates are those in the middle of a run. Complete runs
in RUNS are not repeated. Runs need what `network=emulated` needs. Other arguments are overrides of
every run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

import numpy as np
from harness import OURS, Page, Row, Start, arguments, publish, slug, spread, train_once
from lists import ALONE, ASYNC, BOUNDED, LATE, NO_CHECKPOINTS, SCHEDULES, SERVED, Words

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.parallel.schedule import Op, Pipeline
from dlrm_hybrid.plan.simulation import FORWARD_SHARE
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.run.assembly.build import pipeline
from dlrm_hybrid.telemetry.events import Event, Kind, read
from dlrm_hybrid.train.asynchronous.order_log import order_file, read_order
from dlrm_hybrid.wire.frame import Kind as FrameKind

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
STAGE_RUN = (*ALONE, *SCHEDULES.speed, "network=emulated", "network.rate=100mbit")
STAGE_STEPS = ("train.steps=600", "telemetry.every=5")

TRAINERS, SLOW = 4, 3
PERIOD_SECONDS, STOPPED_SECONDS = 1.0, 0.9
# Reports come by leases of 8 batches: a long run lets that not count.
RECORDED = (ASYNC, "sync.record=true", "train.steps=300")
POLICIES: Mapping[str, Words] = {
    "sync, sharded tables": (),
    "sync": SERVED,
    "bounded 1, lookups 4 ahead": (*LATE, BOUNDED),
    "async": (*SERVED, *RECORDED),
    "async, lookups 4 ahead": (*LATE, *RECORDED),
}
TRAINER_RUN = (
    *("+experiment=dct_hybrid", f"parallel.trainers={TRAINERS}", "parallel.cuts=[]"),
    *("activation=none", "network=emulated", "network.rate=100mbit", "network.latency=20ms"),
    *("data.rows=100000", "train.epochs=10", "telemetry.every=2", *NO_CHECKPOINTS),
)
EVEN_STEPS, SLOW_STEPS = 150, 60


def main() -> None:
    """Do what the first word says, print the page."""
    parser = arguments(__doc__, "simulate", "stages", "trainer", repeats=1)
    parser.add_argument("runs", type=Path, nargs="?", help="folder of the runs")
    parser.add_argument("--slow", type=int, nargs="+", default=[50, 150], help="percent, of stages")
    options, overrides = parser.parse_known_args()

    def measure() -> Page:
        if options.what == "simulate":
            return {"Slow stages, simulated": simulate()}
        if options.runs is None:
            parser.error("the folder of the runs is missing")
        if options.what == "stages":
            rows = stage_rows(options.runs, options.slow, options.repeats, overrides)
            return {"Slow stages": rows}
        return {"A slow trainer": trainer_rows(options.runs, options.repeats, overrides)}

    publish(measure, options.output)


def simulate() -> list[Row]:
    """Slow-downs of each schedule by the step of training, and those of the paper."""
    rows: list[Row] = []
    for name, words in SCHEDULES.worlds.items():
        stages = pipeline(validate(values_of([*ALONE, *words])))
        even = simulated(stages, 0)
        slow = [100 * (even / simulated(stages, one) - 1) for one in SLOW_PERCENT]
        rows.append(slow_row(name, round(even, 3), slow))
    return rows + [slow_row(f"{name}, the paper", None, slow) for name, slow in PAPER.items()]


def slow_row(name: str, even: float | None, slow: Sequence[float]) -> Row:
    """Of one schedule: how much longer a run takes, by how much longer slow batches do."""
    shown = {f"{percent} %": f"{one:.1f}" for percent, one in zip(SLOW_PERCENT, slow, strict=True)}
    return {"schedule": name, "batches per stage time": even, **shown}


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


def stage_rows(
    runs: Path, percents: Sequence[int], repeats: int, overrides: Sequence[str]
) -> list[Row]:
    """Samples per second of each schedule, by how much longer slow batches take."""
    found: dict[tuple[str, int], list[float]] = {}
    for turn, percent, name in product(range(repeats), (0, *percents), SCHEDULES.worlds):
        folder = runs / f"slow-{percent}" / f"{slug(name)}-{turn}"
        # For as much of a slot as makes the work in it take so many percent longer.
        stopped = SLOT_SECONDS * percent / (100 + percent)
        start = slowed(
            "worker-*",
            SLOT_SECONDS,
            lambda random, stopped=stopped: stopped * (random.random() < PROBABILITY),
        )
        words = (*STAGE_RUN, *SCHEDULES.worlds[name], *STAGE_STEPS, *overrides)
        first, last = middle(train_once(folder, *words, start=start), (0.2, 0.9))
        samples = last.values["samples"] - first.values["samples"]
        rate = samples / (last.time_seconds - first.time_seconds)
        found.setdefault((name, percent), []).append(rate)
    return [
        {
            "schedule": name,
            "all alike": spread(found[name, 0], 0),
            **{
                f"{percent} %": f"{spread(found[name, percent], 0)}, "
                f"{100 * (mean(found[name, 0]) / mean(found[name, percent]) - 1):+.0f} %"
                for percent in percents
            },
        }
        for name in SCHEDULES.worlds
    ]


def trainer_rows(runs: Path, repeats: int, overrides: Sequence[str]) -> list[Row]:
    """Rates of the others without and beside the slow trainer, and its own, with each policy."""
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in POLICIES}
    for turn, (name, words) in product(range(repeats), POLICIES.items()):
        folder = runs / f"{slug(name)}-{turn}"
        words = (*words, *overrides)
        even, _ = trainer_rates(folder / "even", words, EVEN_STEPS, slow=False)
        rest, own = trainer_rates(folder / "slow", words, SLOW_STEPS, slow=True)
        found[name].append((even, rest, own))
    return [
        {
            "world": name,
            "all alike": spread([even for even, _, _ in turns], 1),
            "one slow": spread([rest for _, rest, _ in turns], 1),
            "kept": f"{median(rest / even for even, rest, _ in turns):.0%}",
            "its own": spread([own for _, _, own in turns], 1),
        }
        for name, turns in found.items()
    ]


def trainer_rates(folder: Path, words: Words, steps: int, *, slow: bool) -> tuple[float, float]:
    """Batches per second in the middle of a run: of all but the slow trainer, and of that one."""
    start = OURS
    if slow:
        start = slowed(f"worker-{SLOW}*", PERIOD_SECONDS, lambda random: STOPPED_SECONDS)
    run = train_once(folder, *TRAINER_RUN, f"train.steps={steps}", *words, start=start)
    first, last = middle(run, (0.2, 0.8))
    batches = (last.step - first.step) * TRAINERS
    seconds = last.time_seconds - first.time_seconds
    share = share_of_the_slow(folder, first.step, last.step)
    return batches * (1 - share) / seconds, batches * share / seconds


def share_of_the_slow(folder: Path, first: int, last: int) -> float:
    """Of the batches between two steps; in lock-step all trainers have the same."""
    path = order_file(folder, "server-0")
    if not path.exists():
        return 1 / TRAINERS
    pushes = [one.sender for one in read_order(path) if one.kind is FrameKind.PUSH]
    between = pushes[first * TRAINERS : last * TRAINERS]
    return between.count(SLOW) / len(between)


def middle(run: Run, parts: tuple[float, float]) -> tuple[Event, Event]:
    """The points of the loss curve at two parts of it."""
    points = [one for one in run.events if one.kind is Kind.PROGRESS]
    first, last = (points[round(part * (len(points) - 1))] for part in parts)
    return first, last


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


if __name__ == "__main__":
    main()
