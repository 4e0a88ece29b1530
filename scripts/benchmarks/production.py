"""Measures compression with asynchronous trainers: figure 7 and table 5 of the DCT paper.

    python scripts/benchmarks/production.py time RUNS --rates 1gbit 100mbit --repeats 3
    python scripts/benchmarks/production.py loss RUNS --seeds 0 1

`time` trains equal numbers of rows in worlds of processes on emulated links, in turns. `loss`
trains more of them in one process, where the order of trainers is drawn from the seed. Trains in
folders of RUNS; complete runs are not repeated, so an interrupted measurement continues. Arguments
before the options are overrides of every run. `time` needs what `network=emulated` needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import final

from harness import (
    Page,
    Part,
    Row,
    arguments,
    percent_more,
    publish,
    slug,
    spread,
    trained,
)
from utilisation import bytes_per_sample, cpu_percent, faster, network_percent, speed

from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import Run

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
    parser = arguments(__doc__, "time", "loss", runs=True, repeats=3)
    parser.add_argument("--rates", nargs="+", choices=STEPS, default=list(STEPS), help="of time")
    parser.add_argument("--threads", nargs="+", type=int, default=[1], help="of a worker; of time")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1], help="of loss")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options, overrides = parser.parse_known_args()

    def measure() -> Page:
        tables: dict[str, Part] = {}
        for part in options.parts:
            # Parts share worlds that are alike.
            names = {world_slug(name, case): name for name, case in PARTS[part].items()}
            worlds = {key: (*WORLD, *PARTS[part][name].words) for key, name in names.items()}
            if options.what == "loss":
                runs = trained(
                    options.runs / "loss", worlds, (*SCORED, *overrides), seeds=options.seeds
                )
                rows = loss_rows(part, {names[key]: own for key, own in runs.items()})
                tables[part] = Part(rows, "")
                continue
            for rate, threads in product(options.rates, options.threads):
                setting = (*TIMED, f"network.rate={rate}", f"train.steps={STEPS[rate]}")
                setting += (f"parallel.threads={threads}",) * (threads > 1)
                folder = options.runs / rate / f"{threads}-threads"
                runs = trained(folder, worlds, (*setting, *overrides), turns=options.repeats)
                rows = time_rows(part, {names[key]: own for key, own in runs.items()})
                tables[f"{part}: {rate}, threads: {threads}"] = Part(rows, "" if tables else NOTE)
        return tables

    publish(measure, options.output)


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
            "to nothing, %": percent_more(losses[name], losses[NOTHING], 3),
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
