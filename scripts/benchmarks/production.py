"""Measures compression with asynchronous trainers: figure 7 and table 5 of the DCT paper.

    python scripts/benchmarks/production.py time RUNS --rates 1gbit 100mbit --repeats 3
    python scripts/benchmarks/production.py loss RUNS --seeds 0 1

`time` trains equal numbers of rows in worlds of processes on emulated links, in turns. `loss`
trains more of them in one process, where the order of trainers is drawn from the seed. Trains in
folders of RUNS; complete runs are not repeated, so an interrupted measurement continues. Arguments
before the options are overrides of every run. `time` needs what `network=emulated` needs.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import final

from harness import Row, command, load, render, section, slug, spread, train_once
from utilisation import bytes_per_sample, cpu_percent, faster, network_percent, speed

from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.machine import describe

WORLD = (
    *("parallel=hybrid", "embedding=served", "parallel.table_servers=1", "sync=async"),
    *("train.evaluate_every=0", "checkpoint.every=0", "checkpoint.minutes=0"),
)
TIMED = ("network=emulated", "data.rows=100000", "train.epochs=10")
STEPS = {"1gbit": 205, "100mbit": 65}  # by rate, the first five to warm up
SCORED = ("parallel.world=in_process", "optimizer.schedule=linear", "data.rows=400000")
NOTHING = "nothing"


@final
@dataclass(frozen=True, slots=True)
class Case:
    """One world.

    Attributes:
        words: overrides that make it.
        time: what the paper says of its training time against uncompressed, in percent.
        loss: the same of its test loss.
    """

    words: Sequence[str]
    time: str | None = None
    loss: str | None = None


def dct_dp(sparsity: float, lifespan: int) -> Sequence[str]:
    """As in the paper: each threshold by sorting, and kept for so many pushes."""
    return (
        *("parallel.cuts=[]", "gradient=dct", "gradient.threshold=exact", "gradient.renewal=fixed"),
        *(f"gradient.density={1 - sparsity:g}", f"gradient.lifespan={lifespan}"),
    )


def dct_mp(sparsity: float) -> Sequence[str]:
    """Of the activations between two stages, and their gradients."""
    return ("parallel.cuts=[bottom.2]", "activation=dct", f"activation.sparsity={sparsity}")


BESIDE = ("gradient=dct", "gradient.precision=bfloat16", "pull.precision=bfloat16")
SAME = "within 0.01"
PARTS: Mapping[str, Mapping[str, Case]] = {
    "Figure 7, life-spans": {
        NOTHING: Case(("parallel.cuts=[]",)),
        "95 %, L = 1": Case(dct_dp(0.95, 1), "+11", SAME),
        "95 %, L = 1, histogram": Case((*dct_dp(0.95, 1), "gradient.threshold=histogram")),
        "95 %, L = 10": Case(dct_dp(0.95, 10), None, SAME),
        "95 %, L = 100": Case(dct_dp(0.95, 100), None, SAME),
        "95 %, L = 1000": Case(dct_dp(0.95, 1000), "-23", SAME),
    },
    "Figure 7, sparsities": {
        NOTHING: Case(("parallel.cuts=[]",)),
        **{
            f"{100 * sparsity:g} %, L = 1000": Case(dct_dp(sparsity, 1000), time, "no loss")
            for sparsity, time in (
                *((0.75, None), (0.9, None), (0.95, "-23")),
                *((0.98, "as 95 %"), (0.99, "as 95 %"), (0.995, "as 95 %")),
            )
        },
    },
    "Table 5, two stages": {
        NOTHING: Case(("parallel.cuts=[bottom.2]",)),
        "75 %": Case(dct_mp(0.75), "-7.04", "-0.023"),
        "90 %": Case(dct_mp(0.9), "-13.95", "-0.016"),
        "95 %": Case(dct_mp(0.95), "-14.43", "+0.121"),
    },
    "Table 5, beside DCT-DP at 99 %": {
        NOTHING: Case(("parallel.cuts=[bottom.2]", *BESIDE)),
        "75 %": Case((*dct_mp(0.75), *BESIDE)),
        "90 %": Case((*dct_mp(0.9), *BESIDE)),
        "95 %": Case((*dct_mp(0.95), *BESIDE)),
    },
}
NOTE = """
µs per sample, network and CPU use: median (lowest – highest) of the turns; time against nothing
compressed is compared turn by turn. Network use is that of the busiest link."""


def main() -> None:
    """Run what is missing of what the first word says, print the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("time", "loss"))
    parser.add_argument("runs", type=Path, help="folder of the runs")
    parser.add_argument("--rates", nargs="+", choices=STEPS, default=list(STEPS), help="of time")
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="of a worker; of time")
    parser.add_argument("--repeats", type=int, default=3, help="turns of time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of loss")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options, overrides = parser.parse_known_args()
    machine = describe()
    tables: dict[str, list[Row]] = {}
    for part in options.parts:
        if options.what == "loss":
            tables[part] = loss_rows(part, run_losses(options.runs, part, options.seeds, overrides))
            continue
        for rate, threads in product(options.rates, options.threads):
            setting = (*TIMED, f"network.rate={rate}", f"train.steps={STEPS[rate]}")
            if threads > 1:
                setting = (*setting, f"parallel.threads={threads}")
            folder = options.runs / rate / f"{threads}-threads"
            runs = run_turns(folder, part, options.repeats, (*setting, *overrides))
            tables[f"{part}: {rate}, threads: {threads}"] = time_rows(part, runs)
    first, *others = tables
    page = f"{render(first, machine, command(), tables[first])}"
    page += "".join(section(title, tables[title]) for title in others)
    print(f"{page}{NOTE * (options.what == 'time')}\n{load()}")


def run_turns(
    folder: Path, part: str, repeats: int, overrides: Sequence[str]
) -> dict[str, list[Run]]:
    """Runs of each world of a part, by turns; parts share worlds that are alike."""
    found: dict[str, list[Run]] = {name: [] for name in PARTS[part]}
    for turn, (name, case) in product(range(repeats), PARTS[part].items()):
        run = folder / f"{world_slug(name, case)}-{turn}"
        found[name].append(train_once(run, *WORLD, *case.words, *overrides))
    return found


def run_losses(
    runs: Path, part: str, seeds: Sequence[int], overrides: Sequence[str]
) -> dict[str, list[Run]]:
    """Runs of each world of a part, one of each seed."""
    found: dict[str, list[Run]] = {name: [] for name in PARTS[part]}
    for seed, (name, case) in product(seeds, PARTS[part].items()):
        run = runs / "loss" / f"{world_slug(name, case)}-{seed}"
        words = (*WORLD, *SCORED, *case.words, f"train.seed={seed}")
        found[name].append(train_once(run, *words, *overrides))
    return found


def world_slug(name: str, case: Case) -> str:
    """Of the folder of a world: with its cuts, and what is beside."""
    return slug(f"{name} {case.words[0]}{' beside' * (BESIDE[-1] in case.words)}")


def time_rows(part: str, runs: Mapping[str, Sequence[Run]]) -> list[Row]:
    """What each world takes, beside what the paper says."""
    return [
        {
            "compressed": name,
            "µs per sample": spread([1e6 / speed(run) for run in runs[name]], 0),
            "time, %": f"{100 * (1 / median(faster(runs[name], runs[NOTHING])) - 1):+.1f}",
            "paper": case.time,
            "sent, %": sent_percent(runs[name]),
            "bytes/sample": f"{median(bytes_per_sample(run) for run in runs[name]):,.0f}",
            "network, %": spread([network_percent(run) for run in runs[name]], 1),
            "CPU, %": spread([cpu_percent(run) for run in runs[name]], 0),
        }
        for name, case in PARTS[part].items()
    ]


def loss_rows(part: str, runs: Mapping[str, Sequence[Run]]) -> list[Row]:
    """Test loss of each world and, seed by seed, against nothing compressed."""
    losses = {name: [run.summary["test"]["loss"] for run in found] for name, found in runs.items()}
    return [
        {
            "compressed": name,
            "test log-loss": mean_spread(losses[name], 4),
            "to nothing, %": mean_spread(
                [
                    100 * (one / base - 1)
                    for one, base in zip(losses[name], losses[NOTHING], strict=True)
                ],
                3,
                "+",
            ),
            "paper": case.loss,
            "sent, %": sent_percent(runs[name]),
        }
        for name, case in PARTS[part].items()
    ]


def sent_percent(runs: Sequence[Run]) -> str | None:
    """Shares of gradients and activations that were sent; None for all of both."""
    found = {
        what: median(run.summary["compression"][f"{what}_density"] for run in runs)
        for what in ("gradient", "activation")
        if runs[0].config[what]["name"] != "none"
    }
    return ", ".join(f"{what}s {100 * share:.1f}" for what, share in found.items()) or None


if __name__ == "__main__":
    main()
