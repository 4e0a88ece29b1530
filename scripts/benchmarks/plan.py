"""Compares predictions of `plan` with runs on emulated links.

    python scripts/benchmarks/plan.py measure RUNS    train what is missing in RUNS
    python scripts/benchmarks/plan.py compare RUNS    predict every world, and print both
    python scripts/benchmarks/plan.py record RUNS     write the same, as tests read it, to a file
    python scripts/benchmarks/plan.py machines RUNS   the choice for N machines, beside the best

Worlds, their links and their steps were chosen before anything was measured. Costs come from runs
at 1 Gbit/s, which are not compared: first from one alone, then from one of each kind. What worlds
send is counted here, in as many steps as were measured. `compare` trains no world of processes, so
`plan` can be changed without measuring again; nor does `scaling.py`, for which `measure` trains
some worlds. `measure` needs what `network=emulated` needs.

`machines` reads RUNS of `practitioner.py speed`: worlds of N machines on links of several rates. Of
those at each rate it shows which one is predicted to be the fastest, with costs as `plan` has them
by itself: from runs on two machines at 1 Gbit/s with the same batch size.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import final

from harness import (
    OURS,
    Page,
    Part,
    Row,
    arguments,
    each,
    load,
    publish,
    samples_of,
    slug,
    train_once,
)

from dlrm_hybrid.config.choices import Synthetic
from dlrm_hybrid.config.compose import values_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import validate
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.plan.calibration import read
from dlrm_hybrid.plan.counting import Counter
from dlrm_hybrid.plan.prediction import Costs, Prediction, most_like, predict
from dlrm_hybrid.plan.worlds import as_configured
from dlrm_hybrid.report.runs import Run, is_run, read_run
from dlrm_hybrid.run.assembly.build import prepared_folder, semantics
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.telemetry.traffic import Traffic

ROWS = 70_000
RUN = (
    *(f"data.rows={ROWS}", "train.epochs=1000", "network=emulated"),
    *("checkpoint.every=0", "checkpoint.minutes=0", "telemetry.tensorboard=false"),
)
COMPRESSED = "+experiment=dct_hybrid"
KINDS: Mapping[str, Sequence[str]] = {
    "none": ("+experiment=baseline",),
    "dct": (COMPRESSED,),
    "deft": (COMPRESSED, "gradient=deft"),
}
CUTS = {1: "[]", 2: "[bottom.2]", 3: "[bottom.2,top.2]"}
NO_CUT = ("activation=none",)


@final
@dataclass(frozen=True, slots=True)
class World:
    """A world on emulated links, each rank on a host of its own.

    Attributes:
        gradient: none, dct or deft; of KINDS.
        trainers: T.
        stages: W.
        servers: S.
        rate: of each link.
        steps: of the run; the first five are not timed.
        sync: sync, bounded or async.
        tables: table servers; 0 leaves the tables in the trainers.
        latency: one way; None for none.
        batch_size: rows of a trainer's batch.
    """

    gradient: str
    trainers: int
    stages: int
    servers: int
    rate: str
    steps: int
    sync: str = "sync"
    tables: int = 0
    latency: str | None = None
    batch_size: int = 128

    @property
    def words(self) -> Sequence[str]:
        """Overrides that make it."""
        words = [*KINDS[self.gradient], *RUN, f"parallel.trainers={self.trainers}"]
        words += [f"parallel.cuts={CUTS[self.stages]}", f"parallel.servers={self.servers}"]
        words += [f"network.rate={self.rate}", f"train.steps={self.steps}", f"sync={self.sync}"]
        words += [f"train.batch_size={self.batch_size}"]
        if self.stages == 1 and self.gradient != "none":
            words += NO_CUT
        if self.tables:
            words += ["embedding=served", f"parallel.table_servers={self.tables}"]
            if self.gradient != "none":
                words += ["embedding.comm_precision=bfloat16"]
        return words if self.latency is None else [*words, f"network.latency={self.latency}"]

    @property
    def name(self) -> str:
        """What distinguishes it, in few words."""
        tables = f" + {self.tables}" if self.tables else ""
        shape = f"{self.trainers} × {self.stages} + {self.servers}{tables}"
        batch = f" batch {self.batch_size}" * (self.batch_size != 128)
        return f"{self.gradient} {shape} {self.sync}{batch}"

    @property
    def links(self) -> str:
        """Rate and latency."""
        return self.rate if self.latency is None else f"{self.rate} {self.latency}"

    def folder(self, runs: Path) -> Path:
        """Where it is trained."""
        return runs / slug(f"{self.name} {self.links}".replace("×", "x"))


CALIBRATIONS: Mapping[str, World] = {
    "dct": World("dct", 2, 3, 1, "1gbit", 405),
    "none": World("none", 2, 3, 1, "1gbit", 205),
    "deft": World("deft", 2, 3, 1, "1gbit", 305),
    "served": World("dct", 2, 3, 1, "1gbit", 405, tables=1),
}
WORLDS = (
    World("none", 2, 3, 1, "100mbit", 30),
    World("none", 1, 3, 1, "10mbit", 10),
    World("none", 2, 2, 2, "100mbit", 40),
    World("none", 4, 1, 1, "1gbit", 100),
    World("none", 2, 3, 1, "100mbit", 35, sync="bounded"),
    World("none", 2, 1, 2, "100mbit", 40, sync="async", tables=1),
    World("none", 2, 2, 1, "100mbit", 30, tables=1, latency="20ms"),
    World("dct", 2, 3, 1, "100mbit", 400),
    World("dct", 2, 3, 1, "10mbit", 80),
    World("dct", 1, 3, 1, "100mbit", 600),
    World("dct", 4, 1, 1, "100mbit", 300),
    World("dct", 4, 1, 1, "10mbit", 60),
    World("dct", 2, 3, 1, "10mbit", 80, sync="bounded"),
    World("dct", 2, 3, 1, "100mbit", 50, latency="20ms"),
    World("dct", 2, 1, 1, "100mbit", 400, tables=1),
    World("dct", 4, 1, 1, "100mbit", 100, sync="async", tables=1, latency="20ms"),
    World("dct", 2, 2, 2, "1gbit", 400, sync="bounded", tables=1),
    World("dct", 1, 2, 1, "10mbit", 80, sync="async", tables=1),
    World("dct", 4, 2, 2, "1gbit", 250),
    World("dct", 2, 1, 2, "1gbit", 600, sync="async", tables=1),
    World("deft", 2, 3, 1, "100mbit", 300),
    World("deft", 4, 1, 2, "10mbit", 60),
    World("deft", 2, 2, 1, "1gbit", 300, tables=1),
    World("deft", 2, 1, 1, "100mbit", 60, latency="20ms"),
)
WEAK = tuple(
    World(gradient, trainers, 1, 1, "100mbit", steps)
    for gradient, all_steps in {
        "none": (40, 22, 14, 9),
        "dct": (500, 400, 300, 150),
        "deft": (400, 300, 200, 100),
    }.items()
    for trainers, steps in zip((1, 2, 4, 8), all_steps, strict=True)
)
STRONG = tuple(
    World(gradient, trainers, 1, 1, "100mbit", steps, batch_size=1024 // trainers)
    for gradient, all_steps in {"none": (40, 22, 14), "dct": (150, 200, 250)}.items()
    for trainers, steps in zip((1, 2, 4), all_steps, strict=True)
)
SCALES: Mapping[str, Sequence[World]] = {"weak": WEAK, "strong": STRONG}

CLASSES = tuple(traffic for traffic in Traffic if traffic is not Traffic.CONTROL)
GOALS = {"samples/s": (7.0, 20.0), "bytes": (None, 1.0), "memory": (None, 15.0)}


def main() -> None:
    """Do what the first word says."""
    parser = arguments(__doc__, "measure", "compare", "record", "machines", runs=True)
    parser.add_argument(
        "--calibrations",
        nargs="+",
        choices=CALIBRATIONS,
        default=list(CALIBRATIONS),
        help="runs to take costs from; they are also compared with the first of them alone",
    )
    options = parser.parse_args()
    if options.what == "measure":
        train_all(options.runs)
    elif options.what == "record":
        (options.output or Path("/dev/stdout")).write_text(record(options.runs), encoding="utf-8")
    elif options.what == "machines":
        publish(lambda: machines(options.runs), options.output)
    else:
        publish(lambda: compare(options.runs, options.calibrations), options.output)


def train_all(runs: Path) -> None:
    """Train what is missing, calibrations first."""
    for world in dict.fromkeys((*CALIBRATIONS.values(), *WORLDS, *WEAK, *STRONG)):
        train_once(world.folder(runs), *world.words)
    print(f"all is measured. {load()}")


def compare(runs: Path, calibrations: Sequence[str]) -> Page:
    """Predictions beside runs: speed, bytes and memory of every world."""
    choices = list(dict.fromkeys((tuple(calibrations[:1]), tuple(calibrations))))
    found = {world: read_run(world.folder(runs)) for world in WORLDS}
    tables: dict[str, Part] = {}
    predicted: Predicted = {}
    for names in each("calibrations", choices):
        costs = costs_of(runs, names)
        predicted = {world: predicted_run(run, costs) for world, run in found.items()}
        tables[f"Samples per second, costs from {', '.join(names)}"] = Part(
            speed_rows(found, predicted), summary(speed_errors(found, predicted), "samples/s")
        )
    return tables | {
        "Bytes per sample": Part(
            byte_rows(found, predicted), summary(byte_errors(found, predicted), "bytes")
        ),
        "Peak memory, all ranks": Part(
            memory_rows(found, predicted), summary(memory_errors(found, predicted), "memory")
        ),
    }


def record(runs: Path) -> str:
    """What tests hold predictions to: costs of the first calibration, and each world as it was."""
    (costs,) = costs_of(runs, (next(iter(CALIBRATIONS)),))
    trained = {world: read_run(world.folder(runs)) for world in WORLDS}
    layouts = [counter().layout(validate(run.config)) for run in trained.values()]
    worlds = [
        {
            "name": world.name,
            "links": world.links,
            "words": list(world.words),
            "measured": round(run.summary["samples_per_second"], 1),
            "bytes_per_sample": round(sum(sent_per_sample(run).values()), 1),
            "exchange": [rounded(size) for size in layout.exchange],
            "sent": [
                [way.kind.name, *way[1:], rounded(sent.messages), rounded(sent.num_bytes)]
                for way, sent in layout.sent.items()
            ],
        }
        for (world, run), layout in zip(trained.items(), layouts, strict=True)
    ]
    units = {name: rounded(seconds) for name, seconds in asdict(costs.units).items()}
    table_rows = list(layouts[0].spec.table_rows)
    lines = ",\n".join(json.dumps(world, ensure_ascii=False) for world in worlds)
    head = json.dumps({"units": units, "table_rows": table_rows})
    return f'{head[:-1]}, "worlds": [\n{lines}\n]}}\n'


def rounded(number: float) -> float:
    """Six digits of it."""
    return float(f"{number:.6g}")


MOST_STEPS = 1_000  # to count: of every world all of its run


@cache
def counter(rows: int = ROWS, steps: int = MOST_STEPS) -> Counter:
    """Of worlds of so many rows, which are prepared if they are not there."""
    words = [*RUN, f"data.rows={rows}"]
    OURS(["prepare", f"data.rows={rows}"])
    config = validate(values_of(["parallel=hybrid", *words]))
    shards = open_shards(prepared_folder(config), semantics(config))
    return Counter(shards, steps, lambda text: print(text, file=sys.stderr))


@cache
def costs_of(runs: Path, names: tuple[str, ...]) -> tuple[Costs, ...]:
    """What the calibration runs of these names say of costs."""
    found = [read(CALIBRATIONS[name].folder(runs)) for name in names]
    return tuple(Costs.of(one, counter().layout(one.config)) for one in found)


def predicted_run(run: Run, costs: Sequence[Costs]) -> Prediction:
    """The world of a run, predicted from the most similar of other runs."""
    config = validate(run.config)
    world, like = counter().layout(config), most_like(costs, config)
    return predict(as_configured(config), world, like, counter().train_rows)


LINK, FEWEST = "1gbit", 2  # machines of the runs that costs are taken from
CLOSE = 0.95  # of the best of all worlds tried, what is chosen is to have


def machines(runs: Path) -> Page:
    """Every world of N machines as measured and as predicted, and how good the choice is."""
    found = speeds(runs)
    rows: list[Row] = []
    shares: list[float] = []
    costs = {
        size: [
            Costs.of(one := read(run.folder), counter_of(one.config).layout(one.config))
            for run in map(middle_turn, worlds.values())
        ]
        for (number, size, link), worlds in found.items()
        if (number, link) == (FEWEST, LINK)
    }
    for (number, batch_size, link), worlds in each("links", sorted(found.items())):
        measured = {name: speed_of(middle_turn(turns)) for name, turns in worlds.items()}
        if batch_size not in costs:
            raise SystemExit(f"{runs}: no run of {FEWEST} machines at {LINK}, batch {batch_size}")
        predicted = {
            name: predicted_of(turns[0], costs[batch_size]) for name, turns in worlds.items()
        }
        choice, best = max(predicted, key=lambda one: predicted[one]), max(measured.values())
        shares.append(measured[choice] / best)
        rows += [
            {
                "machines": number,
                "batch": batch_size,
                "links": link,
                "world": f"**{name}**" if name == choice else name,
                "measured": f"{speed:,.0f}",
                "÷ best": f"{speed / best:.2f}",
                "predicted": f"{predicted[name]:,.0f}",
                "error, %": f"{error_percent(predicted[name], speed):+.1f}",
            }
            for name, speed in measured.items()
        ]
    near = sum(one >= CLOSE for one in shares)
    text = f"The **choice** has {100 * CLOSE:.0f} % of the best in {near} of {len(shares)} cases."
    return {"Which world on N machines": Part(rows, f"\n{text}")}


def speeds(runs: Path) -> dict[tuple[int, int, str], dict[str, list[Run]]]:
    """Turns of worlds with a server beside each trainer or none, by number, batch and links."""
    found: dict[tuple[int, int, str], dict[str, list[Run]]] = {}
    for folder in sorted(runs.glob("*/*-*-*-*-*")):
        name, trainers, servers, batch_size, _ = folder.name.split("-")
        is_whole = servers in (trainers, "0") and is_run(folder)
        if is_whole and read_run(folder).status == COMPLETE:
            worlds = found.setdefault((int(trainers), int(batch_size), folder.parent.name), {})
            worlds.setdefault(name + ", no server" * (servers == "0"), []).append(read_run(folder))
    return {of: worlds for of, worlds in found.items() if len(worlds) > 1}


def speed_of(run: Run) -> float:
    """Samples per second."""
    return run.summary["samples_per_second"]


def middle_turn(turns: Sequence[Run]) -> Run:
    """That with the median speed, the slower of two."""
    return sorted(turns, key=speed_of)[(len(turns) - 1) // 2]


def counter_of(config: Config) -> Counter:
    """Counts what `plan` does of the rows of a run."""
    assert isinstance(config.data, Synthetic)
    return counter(config.data.rows, config.plan.count_steps)


def predicted_of(run: Run, costs: Sequence[Costs]) -> float:
    """Samples per second of the world of a run on its links."""
    config = validate(run.config)
    counted = counter_of(config)
    like = most_like(costs, config)
    return predict(
        as_configured(config), counted.layout(config), like, counted.train_rows
    ).samples_per_second


Found = Mapping[World, Run]
Predicted = Mapping[World, Prediction]


def error_percent(predicted: float, measured: float) -> float:
    """How much more was predicted than measured."""
    return 100 * (predicted / measured - 1)


def speed_errors(found: Found, predicted: Predicted) -> list[float]:
    """Of each world, in percent."""
    return [
        error_percent(predicted[world].samples_per_second, run.summary["samples_per_second"])
        for world, run in found.items()
    ]


def speed_rows(found: Found, predicted: Predicted) -> list[Row]:
    """Samples per second of each world, and what is said to limit it."""
    return [
        {
            "world": world.name,
            "links": world.links,
            "measured": f"{run.summary['samples_per_second']:,.0f}",
            "predicted": f"{predicted[world].samples_per_second:,.0f}",
            "error, %": f"{error:+.1f}",
            "limited by": str(predicted[world].bottleneck),
        }
        for (world, run), error in zip(found.items(), speed_errors(found, predicted), strict=True)
    ]


def sent_per_sample(run: Run) -> dict[Traffic, float]:
    """Bytes that a run has sent, by class, without its control messages."""
    sent, samples = run.summary["network"]["by_class"], samples_of(run)
    return {one: sent[one]["bytes"] / samples for one in CLASSES if one in sent}


def byte_errors(found: Found, predicted: Predicted) -> list[float]:
    """Of each world, in percent."""
    return [
        error_percent(
            sum(predicted[world].bytes_per_sample.values()), sum(sent_per_sample(run).values())
        )
        for world, run in found.items()
    ]


def byte_rows(found: Found, predicted: Predicted) -> list[Row]:
    """Bytes per sample of each world, and the error of each class of them."""
    rows: list[Row] = []
    for (world, run), error in zip(found.items(), byte_errors(found, predicted), strict=True):
        measured, calculated = sent_per_sample(run), predicted[world].bytes_per_sample
        by_class = {
            f"{traffic.value.replace('_', ' ')}, %": (
                f"{error_percent(calculated[traffic], measured[traffic]):+.1f}"
                if measured.get(traffic)
                else None
            )
            for traffic in CLASSES
        }
        rows.append(
            {
                "world": world.name,
                "measured": f"{sum(measured.values()):,.0f}",
                "predicted": f"{sum(calculated.values()):,.0f}",
                "error, %": f"{error:+.2f}",
                **by_class,
            }
        )
    return rows


def peak_bytes(run: Run) -> dict[str, float]:
    """Memory of each rank at most, by name."""
    roles = run.summary["roles"].values()
    return {one["role"]: one["peak_rss_bytes"] for one in roles}


def memory_errors(found: Found, predicted: Predicted) -> list[float]:
    """Of every rank of every world, in percent."""
    return [one for world, run in found.items() for one in _memory_errors(run, predicted[world])]


def _memory_errors(run: Run, predicted: Prediction) -> list[float]:
    return [
        error_percent(predicted.memory_bytes[name], measured)
        for name, measured in peak_bytes(run).items()
    ]


def memory_rows(found: Found, predicted: Predicted) -> list[Row]:
    """Peak memory of each world, all ranks together, and the error of the worst rank."""
    rows: list[Row] = []
    for world, run in found.items():
        measured, calculated = peak_bytes(run), predicted[world].memory_bytes
        total, expected = sum(measured.values()), sum(calculated.values())
        rows.append(
            {
                "world": world.name,
                "measured, MB": f"{total / 1e6:,.0f}",
                "predicted, MB": f"{expected / 1e6:,.0f}",
                "error, %": f"{error_percent(expected, total):+.1f}",
                "worst rank, %": f"{max(_memory_errors(run, predicted[world]), key=abs):+.1f}",
            }
        )
    return rows


def summary(errors: Sequence[float], what: str) -> str:
    """A sentence on errors in percent beside what was aimed at."""
    sizes = [abs(one) for one in errors]
    middle, worst = GOALS[what]
    goal = f"at most {worst:g} %" if middle is None else f"{middle:g} %, each at most {worst:g} %"
    within = sum(one <= worst for one in sizes)
    return (
        f"\nError of {what}: median {median(sizes):.1f} %, worst {max(sizes):.1f} %; "
        f"{within} of {len(sizes)} within {worst:g} %. Goal: {goal}.\n"
    )


if __name__ == "__main__":
    main()
