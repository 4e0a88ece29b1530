"""Measures asynchronous pipelines (`schedule=dsp`): scores, speed on slow links, slow stages.

    python scripts/benchmarks/dsp.py quality RUNS       scores of each staleness, in one process
    python scripts/benchmarks/dsp.py speed RUNS         on emulated links, beside what `plan` says
    python scripts/benchmarks/dsp.py stragglers RUNS    stages that are slow at random moments
    python scripts/benchmarks/dsp.py simulate           the same, simulated with the step itself

Trains in folders of RUNS; complete runs are not repeated, so an interrupted measurement continues.
Other arguments are overrides of every run. `speed` and `stragglers` need what `network=emulated`
needs. `speed` predicts every world before the first of them is measured.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

import slow_stages
from harness import Row, command, load, render, section, slug, spread, train_once
from slow_stages import PAPER, SLOW_PERCENT
from utilisation import cpu_percent, faster, network_percent, speed

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.report.measures import Summary, mean_spread
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.run.assembly.build import pipeline
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ExitCode

NO_CHECKPOINTS = ("checkpoint.every=0", "checkpoint.minutes=0")
ALONE = ("parallel=hybrid", "parallel.trainers=1", "parallel.servers=0", *NO_CHECKPOINTS)
STALE: Mapping[str, Sequence[str]] = {
    "4,2,0": ("schedule=dsp", "schedule.delays=[1,1,0]", "schedule.staleness=[4,2,0]"),
    "6,3,0": ("schedule=dsp", "schedule.delays=[2,2,0]", "schedule.staleness=[6,3,0]"),
    "10,5,0": ("schedule=dsp", "schedule.delays=[3,3,0]", "schedule.staleness=[10,5,0]"),
}
"""As in the paper, for three stages, by the staleness."""
SCHEDULES: Mapping[str, Sequence[str]] = {
    "sequential": (),
    "one_f_one_b, 4": ("schedule=one_f_one_b", "schedule.microbatches=4"),
    **{f"dsp {name}": words for name, words in STALE.items()},
}
RUN_SCHEDULES = tuple(name for name in SCHEDULES if name != "dsp 6,3,0")
WITHOUT_WARMUP = ("4,2,0", "10,5,0")
SCORED = ("parallel.world=in_process", "optimizer.schedule=linear", "data.rows=1170000")

WORLDS: Mapping[tuple[int, str], Sequence[str]] = {
    (1, "nothing"): ALONE,
    (1, "DCT"): (*ALONE, "activation=dct", "activation.precision=bfloat16"),
    (2, "nothing"): ("+experiment=baseline", *NO_CHECKPOINTS),
    (2, "DCT"): ("+experiment=dct_hybrid", *NO_CHECKPOINTS),
}
"""By number of trainers, and what is compressed; two trainers have a server."""
COMPRESSIONS = ("nothing", "DCT")
LINKS: Mapping[str, Sequence[str]] = {"0ms": (), "20ms": ("network.latency=20ms",)}
# At the usual rate and without a warm-up (10,5,0) diverges in fifty steps.
EMULATED = (
    *("network=emulated", "data.rows=300000", "train.epochs=10", "train.evaluate_every=0"),
    "optimizer.lr=0.01",
)
RATE, CALIBRATION_RATE = "100mbit", "1gbit"
SPEED_NOTE = """
Samples/s and use: median (lowest – highest) of the turns; `to sequential` compares turn by turn.
`predicted` is what `plan` said before any of these runs, from one sequential run for each
compression at 1 Gbit/s without latency; `error` is that of the prediction."""
SLOW_NOTE = """
Samples/s in the middle of a run: median (lowest – highest) of the turns; then the slow-down."""


def main() -> None:
    """Run what is missing of what the first word says, print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    words = parser.add_subparsers(dest="what", required=True)
    words.add_parser("simulate")
    one = {name: words.add_parser(name) for name in ("quality", "speed", "stragglers")}
    for each in one.values():
        each.add_argument("runs", type=Path, help="folder of the runs")
    one["quality"].add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    one["quality"].add_argument("--warmup", type=int, default=2000, help="steps")
    one["speed"].add_argument("--trainers", type=int, choices=(1, 2), default=1)
    one["stragglers"].add_argument("--slow", type=int, nargs="+", default=[50, 150], help="percent")
    for each in (one["speed"], one["stragglers"]):
        each.add_argument("--steps", type=int, default=0, help="of every run")
        each.add_argument("--repeats", type=int, default=1, help="turns")
    options, overrides = parser.parse_known_args()
    machine = describe()
    if options.what == "simulate":
        page = render("Slow stages, simulated", machine, command(), simulated())
    elif options.what == "quality":
        rows = quality(options.runs, options.seeds, options.warmup, overrides)
        page = render("Log-loss by staleness", machine, command(), rows)
    elif options.what == "speed":
        (title, first), *others = speeds(options, overrides).items()
        page = render(title, machine, command(), first)
        page += "".join(section(name, rows) for name, rows in others) + SPEED_NOTE
    else:
        page = render("Slow stages", machine, command(), stragglers(options, overrides)) + SLOW_NOTE
    print(f"{page}\n{load()}")


def quality(runs: Path, seeds: Sequence[int], warmup: int, overrides: Sequence[str]) -> list[Row]:
    """Test part and last tenth of each world by seed, and means of what did not diverge."""
    warm = f"optimizer.staleness_warmup_steps={warmup}"
    cases: dict[str, Sequence[str]] = {"sequential": ()}
    cases |= {f"{name}, warm-up": (*words, warm) for name, words in STALE.items()}
    cases |= {name: STALE[name] for name in WITHOUT_WARMUP}
    found: dict[str, list[Summary | None]] = {name: [] for name in cases}
    for seed, (name, words) in product(seeds, cases.items()):
        words = (*ALONE, *SCORED, *words, f"train.seed={seed}", *overrides)
        found[name].append(scores(runs / f"{slug(name)}-{seed}", *words))
    return [quality_row(name, found[name], found["sequential"], seeds) for name in cases]


def quality_row(
    name: str,
    found: Sequence[Summary | None],
    base: Sequence[Summary | None],
    seeds: Sequence[int],
) -> Row:
    """Of one world: test part and last tenth by seed; means against sequential, seed by seed."""
    pairs = [(one, other) for one, other in zip(found, base, strict=True) if one and other]
    behind = {
        f"{title}, %": mean_spread(
            [100 * (one[part]["loss"] / other[part]["loss"] - 1) for one, other in pairs], 2, "+"
        )
        if pairs
        else None
        for title, part in (("test", "test"), ("last tenth", "train"))
    }
    return {
        "staleness": name,
        **{
            f"seed {seed}": f"{one['test']['loss']:.4f}, {one['train']['loss']:.4f}"
            if one
            else "diverged"
            for seed, one in zip(seeds, found, strict=True)
        },
        **behind,
    }


def scores(folder: Path, *overrides: str) -> Summary | None:
    """What a run has scored; None if it diverged.

    Raises:
        SystemExit: the run failed otherwise; it has said on standard error why.
    """
    if is_run(folder) and read_run(folder).status == "diverged":
        return None
    try:
        return train_once(folder, *overrides).summary
    except subprocess.CalledProcessError as failure:
        if failure.returncode == ExitCode.DIVERGED:
            return None
        sys.exit(f"{folder}: exit code {failure.returncode}")


Case = tuple[str, str, str]
"""A schedule, what is compressed, a latency."""


def speeds(options: argparse.Namespace, overrides: Sequence[str]) -> dict[str, list[Row]]:
    """A table for each latency and compression; predicted first, then measured by turns."""
    predicted = predictions(options.runs, options.trainers, overrides)
    cases = list(product(RUN_SCHEDULES, COMPRESSIONS, LINKS))
    found: dict[Case, list[Run]] = {case: [] for case in cases}
    for turn, case in product(range(options.repeats), cases):
        schedule, compression, link = case
        folder = options.runs / f"{options.trainers}-{link}" / f"{slug(' '.join(case[:2]))}-{turn}"
        words = (*WORLDS[options.trainers, compression], *SCHEDULES[schedule], *EMULATED)
        links = (f"network.rate={RATE}", *LINKS[link])
        steps = f"train.steps={options.steps or steps_of(case)}"
        found[case].append(train_once(folder, *words, *links, steps, *overrides))
    return {
        f"{compression} compressed, {link}, {options.trainers} × 3": [
            speed_row(schedule, found[case], found[first], predicted[case])
            for schedule in RUN_SCHEDULES
            for case, first in [((schedule, compression, link), ("sequential", compression, link))]
        ]
        for compression, link in product(COMPRESSIONS, LINKS)
    }


def steps_of(case: Case) -> int:
    """Enough for ten seconds."""
    schedule, _, link = case
    return 400 if link == "0ms" or schedule.startswith("dsp") else 120


def predictions(runs: Path, trainers: int, overrides: Sequence[str]) -> dict[Case, float]:
    """Samples per second of every world as `plan` says, from sequential runs at the higher rate."""
    found: dict[Case, float] = {}
    for compression, (schedule, words) in product(COMPRESSIONS, SCHEDULES.items()):
        if schedule not in RUN_SCHEDULES:
            continue
        world = (*WORLDS[trainers, compression], *EMULATED)
        calibration = runs / f"{trainers}-calibration" / slug(compression)
        rate = f"network.rate={CALIBRATION_RATE}"
        train_once(calibration, *world, rate, "train.steps=400", *overrides)
        output = runs / f"{trainers}-plan" / f"{slug(f'{schedule} {compression}')}.json"
        if not output.exists():
            asked = (f"plan.rates=[{RATE}]", f"plan.latencies=[{','.join(LINKS)}]")
            told = (f"plan.calibration={calibration}", f"plan.output={output}", rate)
            output.parent.mkdir(parents=True, exist_ok=True)
            argv = [sys.executable, "-m", "dlrm_hybrid", "plan", *world, *words, *asked, *told]
            subprocess.run([*argv, *overrides], check=True, stdout=sys.stderr)
        worlds = json.loads(output.read_text(encoding="utf-8"))["worlds"]
        for link, one in zip(LINKS, worlds, strict=True):
            found[schedule, compression, link] = one["samples_per_second"]
    return found


def speed_row(schedule: str, turns: Sequence[Run], base: Sequence[Run], predicted: float) -> Row:
    """Of one schedule."""
    return {
        "schedule": schedule,
        "samples/s": spread([speed(run) for run in turns], 0),
        "to sequential": spread(faster(turns, base), 2),
        "predicted": round(predicted),
        "error": f"{predicted / median(speed(run) for run in turns) - 1:+.0%}",
        "network, %": spread([network_percent(run) for run in turns], 1),
        "CPU, %": spread([cpu_percent(run) for run in turns], 0),
    }


def simulated() -> list[Row]:
    """Slow-downs by the simulation of `plan`, and those of the paper."""
    rows: list[Row] = []
    for name, words in SCHEDULES.items():
        stages = pipeline(validate(values_of([*ALONE, *words])))
        even = slow_stages.simulated(stages, 0)
        slow = [100 * (even / slow_stages.simulated(stages, one) - 1) for one in SLOW_PERCENT]
        rows.append(slow_row(name, round(even, 3), slow))
    return rows + [slow_row(f"{name}, the paper", None, slow) for name, slow in PAPER.items()]


def slow_row(name: str, even: float | None, slow: Sequence[float]) -> Row:
    """Of one schedule: how much longer a run takes, by how much longer slow batches do."""
    shown = {f"{percent} %": f"{one:.1f}" for percent, one in zip(SLOW_PERCENT, slow, strict=True)}
    return {"schedule": name, "batches per stage time": even, **shown}


def stragglers(options: argparse.Namespace, overrides: Sequence[str]) -> list[Row]:
    """Samples per second of each schedule, by how much longer slow batches take."""
    percents = (0, *options.slow)
    found: dict[tuple[str, int], list[float]] = {}
    for turn, percent, name in product(range(options.repeats), percents, RUN_SCHEDULES):
        folder = options.runs / f"slow-{percent}" / f"{slug(name)}-{turn}"
        words = (*ALONE, *SCHEDULES[name], *EMULATED, f"network.rate={RATE}", "telemetry.every=5")
        if not (is_run(folder) and read_run(folder).status == COMPLETE):
            shutil.rmtree(folder, ignore_errors=True)
            steps = f"train.steps={options.steps or 600}"
            slow_stages.train_slowly(folder, percent, *words, steps, *overrides)
        found.setdefault((name, percent), []).append(slow_stages.rate_of(folder))
    return [
        {
            "schedule": name,
            "all alike": spread(found[name, 0], 0),
            **{
                f"{percent} %": f"{spread(found[name, percent], 0)}, "
                f"{100 * (mean(found[name, 0]) / mean(found[name, percent]) - 1):+.0f} %"
                for percent in options.slow
            },
        }
        for name in RUN_SCHEDULES
    ]


if __name__ == "__main__":
    main()
