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
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, median

import slow_stages
from harness import (
    OURS,
    Page,
    Part,
    Row,
    losses_of,
    percent_more,
    publish,
    scored,
    slug,
    spread,
    train_once,
    trained,
)
from slow_stages import PAPER, SLOW_PERCENT
from utilisation import cpu_percent, faster, network_percent, speed

from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.report.measures import Summary
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.run.assembly.build import pipeline

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

    def measure() -> Page:
        if options.what == "simulate":
            return {"Slow stages, simulated": simulated()}
        if options.what == "quality":
            rows = quality(options.runs, options.seeds, options.warmup, overrides)
            return {"Log-loss by staleness": rows}
        if options.what == "speed":
            return speeds(options, overrides)
        return {"Slow stages": Part(stragglers(options, overrides), SLOW_NOTE)}

    publish(measure)


def quality(runs: Path, seeds: Sequence[int], warmup: int, overrides: Sequence[str]) -> list[Row]:
    """Test part and last tenth of each world by seed, and means of what did not diverge."""
    warm = f"optimizer.staleness_warmup_steps={warmup}"
    cases: dict[str, Sequence[str]] = {"sequential": ()}
    cases |= {f"{name}, warm-up": (*words, warm) for name, words in STALE.items()}
    cases |= {name: STALE[name] for name in WITHOUT_WARMUP}
    worlds = {name: (*ALONE, *SCORED, *words, *overrides) for name, words in cases.items()}
    found = scored(runs, worlds, seeds)
    return [quality_row(name, own, found["sequential"], seeds) for name, own in found.items()]


def quality_row(
    name: str,
    found: Sequence[Summary | None],
    base: Sequence[Summary | None],
    seeds: Sequence[int],
) -> Row:
    """Of one world: test part and last tenth by seed; means against sequential, seed by seed."""
    pairs = [(one, other) for one, other in zip(found, base, strict=True) if one and other]
    behind: dict[str, str | None] = {}
    for title, part in (("test", "test"), ("last tenth", "train")):
        own, other = ([pair[place][part]["loss"] for pair in pairs] for place in (0, 1))
        behind[f"{title}, %"] = percent_more(own, other, 2) if pairs else None
    return {"staleness": name, **losses_of(found, seeds), **behind}


Case = tuple[str, str, str]
"""A schedule, what is compressed, a latency."""


def speeds(options: argparse.Namespace, overrides: Sequence[str]) -> Page:
    """A table for each latency and compression; predicted first, then measured by turns."""
    predicted = predictions(options.runs, options.trainers, overrides)
    tables: dict[str, Part] = {}
    for compression, link in product(COMPRESSIONS, LINKS):
        world = (*WORLDS[options.trainers, compression], *EMULATED, *LINKS[link])
        worlds: dict[str, Sequence[str]] = {}
        for schedule in RUN_SCHEDULES:
            steps = options.steps or steps_of((schedule, compression, link))
            words = (f"network.rate={RATE}", f"train.steps={steps}", *SCHEDULES[schedule])
            worlds[f"{schedule} {compression}"] = (*world, *words)
        folder = options.runs / f"{options.trainers}-{link}"
        found = trained(folder, worlds, overrides, turns=options.repeats)
        base = found[f"sequential {compression}"]
        rows = [
            speed_row(schedule, turns, base, predicted[schedule, compression, link])
            for schedule, turns in zip(RUN_SCHEDULES, found.values(), strict=True)
        ]
        title = f"{compression} compressed, {link}, {options.trainers} × 3"
        tables[title] = Part(rows, "" if tables else SPEED_NOTE)
    return tables


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
            OURS(["plan", *world, *words, *asked, *told, *overrides])
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
        steps = f"train.steps={options.steps or 600}"
        start = slow_stages.with_slow_stages(percent)
        run = train_once(folder, *words, steps, *overrides, start=start)
        found.setdefault((name, percent), []).append(slow_stages.rate_of(run))
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
