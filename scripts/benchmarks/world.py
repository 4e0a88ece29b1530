"""Measures runs of several processes and prints the figures as Markdown tables.

    python scripts/benchmarks/world.py bytes     bytes sent, beside those expected
    python scripts/benchmarks/world.py cpu       CPU time per sample, and where it goes
    python scripts/benchmarks/world.py start     seconds from the command to the first step
    python scripts/benchmarks/world.py quality data=criteo_kaggle data.prepared=FOLDER
                                              test scores of a world and of one process

Arguments after the first word are overrides of every run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from harness import Page, Part, Row, arguments, program, publish, samples_of, spread, train_once
from plain_ranks import cpu_microseconds

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.events import Kind
from dlrm_hybrid.telemetry.traffic import Phase

FLOAT_BYTES = 4
TABLES = 26
ID_BYTES = 4  # one for each row and table, so none needs a length

BYTES_WORLD = ("+experiment=baseline", "train.steps=105")
CPU_WORLD = ("+experiment=baseline", "parallel.cuts=[]", "train.batch_size=64", "train.steps=1505")
PLAIN_RANKS, PLAIN_ROWS, PLAIN_STEPS = 2, 64, 1500
START_WORLD = ("train.steps=1", "telemetry.every=1")
SEEDS = (0, 1, 2)
CPU_SPANS = program(str(Path(__file__).with_name("cpu_spans.py")))
OTHER_THREADS = "other threads: ZeroMQ"


def main() -> None:
    """Measure what the first word says, print the page."""
    options, overrides = arguments(__doc__, *sorted(MEASURES)).parse_known_args()
    with TemporaryDirectory() as folder:
        measure = MEASURES[options.what]
        publish(lambda: measure(Path(folder), options.repeats, overrides), options.output)


def measure_bytes(folder: Path, repeats: int, overrides: Sequence[str]) -> Page:
    """Bytes per sample by class, beside the formulas of dense float32."""
    run = train_once(folder / "run", *BYTES_WORLD, *overrides)
    network, expected = run.summary["network"], expected_bytes(run.config)
    samples, by_class = samples_of(run), network["by_class"]
    rows = [
        _bytes_row(name, tally["messages"], tally["bytes"] / samples, expected[name])
        for name, tally in by_class.items()
    ]
    messages = sum(tally["messages"] for tally in by_class.values())
    rows.append(_bytes_row("all", messages, network["bytes_per_sample"], sum(expected.values())))
    return {"Bytes per sample": rows}


def _bytes_row(name: str, messages: int, counted: float, formula: float) -> Row:
    return {
        "class": name.replace("_", " "),
        "messages": messages,
        "bytes per sample": f"{counted:,.1f}",
        "formula": f"{formula:,.1f}",
        "more": f"{counted / formula - 1:.2%}" if formula else "–",
    }


def expected_bytes(config: Mapping[str, Any]) -> dict[str, float]:
    """Payloads per sample by class, uncompressed float32, tables spread table-wise."""
    model, trainers = config["model"], config["parallel"].get("trainers", 1)
    dim, bottom, batch = model["embedding_dim"], model["bottom"], config["train"]["batch_size"]
    vectors = TABLES + 1
    top = [dim + vectors * (vectors - 1) // 2, *model["top"]]
    widths = {"bottom": bottom, "top": top}
    parameters = sum(
        (inputs + 1) * outputs
        for layers in widths.values()
        for inputs, outputs in zip(layers, layers[1:], strict=False)
    )
    cut = 0
    for name in config["parallel"].get("cuts", []):
        network, _, layer = name.partition(".")
        cut += FLOAT_BYTES * widths[network][int(layer)]
    pooled = 2 * TABLES * dim * FLOAT_BYTES  # forward and backward
    elsewhere = (trainers - 1) / trainers
    return {
        "gradient_push": parameters * FLOAT_BYTES / batch,
        "parameter_pull": parameters * FLOAT_BYTES / batch,
        "activation": cut,
        "activation_gradient": cut,
        "embedding": elsewhere * (pooled + TABLES * ID_BYTES),
        "control": 0.0,
    }


def measure_cpu(folder: Path, repeats: int, overrides: Sequence[str]) -> Page:
    """CPU microseconds per sample by role, in turns with a plain DLRM; where they go."""
    by_role: dict[str, list[float]] = {}
    plain: list[float] = []
    for turn in range(repeats):
        run = train_once(folder / f"{turn}", *CPU_WORLD, *overrides)
        plain.append(cpu_microseconds(PLAIN_RANKS, PLAIN_ROWS, PLAIN_STEPS))
        for role, spent in microseconds_by_role(run).items():
            by_role.setdefault(role, []).append(spent)
    totals: list[float] = [sum(values) for values in zip(*by_role.values(), strict=True)]
    by_role["all"] = totals
    by_role["plain DLRM on two gloo ranks, without servers"] = plain
    rows: list[Row] = [
        {"role": role, "runs": len(values), "µs per sample": spread(values, 1)}
        for role, values in by_role.items()
    ]
    ratios = [ours / theirs for ours, theirs in zip(totals, plain, strict=True)]
    rows.append({"role": "all to plain", "runs": repeats, "µs per sample": spread(ratios, 2)})
    run = train_once(folder / "spans", *CPU_WORLD, *overrides, start=CPU_SPANS)
    return {"CPU time per sample": rows, "Where it goes": shares(run)}


def ranks(run: Run) -> list[Mapping[str, Any]]:
    """What each rank of a run has told at its end."""
    return [event.values for event in run.events if event.kind is Kind.RANK]


def trained_samples(run: Run) -> float:
    """Rows of all trainers in the steps that are measured."""
    return sum(one.values["timed_rows"] for one in run.events if one.kind is Kind.PROGRESS)


def microseconds_by_role(run: Run) -> dict[str, float]:
    """CPU time per sample of each rank in training."""
    samples = trained_samples(run)
    return {rank["role"]: 1e6 * rank["cpu_seconds"][Phase.TRAIN] / samples for rank in ranks(run)}


def microseconds_by_span(run: Run) -> dict[str, dict[str, float]]:
    """CPU time per sample in training, by span and then by `workers` and `servers`.

    Args:
        run: its spans have counted CPU time, see `cpu_spans.py`.
    """
    samples = trained_samples(run)
    spent: dict[str, dict[str, float]] = {}
    for rank in ranks(run):
        spans: Mapping[str, float] = rank["seconds_by_span"]
        others = rank["cpu_seconds"][Phase.TRAIN] - sum(spans.values())
        for label, seconds in {**spans, OTHER_THREADS: others}.items():
            row = spent.setdefault(label, {"workers": 0.0, "servers": 0.0})
            row[f"{rank['role'].partition('-')[0]}s"] += 1e6 * seconds / samples
    return dict(sorted(spent.items(), key=lambda item: -sum(item[1].values())))


def shares(run: Run) -> list[Row]:
    """CPU microseconds per sample of all ranks by what they do, most first."""
    spent = microseconds_by_span(run)
    total = sum(sum(row.values()) for row in spent.values())
    return [
        {
            "µs per sample": label,
            **{column: f"{value:.1f}" for column, value in row.items()},
            "all": f"{sum(row.values()):.1f}",
            "share": f"{sum(row.values()) / total:.1%}",
        }
        for label, row in spent.items()
    ]


def measure_start(folder: Path, repeats: int, overrides: Sequence[str]) -> Page:
    """Seconds from the command until ranks are born, the leader is ready, a step is made."""
    train_once(folder / "warm", *START_WORLD, *overrides)
    rows: list[Row] = []
    for number in range(repeats):
        empty = {"NUMBA_CACHE_DIR": str(folder / f"kernels-{number}")}
        for kernels, environment in (("compiled", {}), ("none compiled", empty)):
            began, start = time.time(), program("-m", "dlrm_hybrid", **environment)
            path = folder / f"{number}-{kernels}"
            run = train_once(path, *START_WORLD, *overrides, start=start)
            found = {event.kind: event.time_seconds for event in run.events}
            born = [one.stat().st_mtime for one in path.glob("log/*.pid")]
            rows.append(
                {
                    "run": number + 1,
                    "kernels": kernels,
                    "last rank born": f"{max(born) - began:.1f}",
                    "all have met": f"{found[Kind.STARTED] - began:.1f}",
                    "first step made": f"{found[Kind.PROGRESS] - began:.1f}",
                    "load": f"{os.getloadavg()[0]:.1f}",
                }
            )
    return {"Seconds from the command to the first step": rows}


def measure_quality(folder: Path, repeats: int, overrides: Sequence[str]) -> Page:
    """Test scores of a world of processes and of one process at the same global batch."""
    rows: list[Row] = []
    losses: dict[str, list[float]] = {"world": [], "one process": []}
    for seed in SEEDS:
        for name, options in (("world", "hybrid"), ("one process", "single")):
            batch = 128 if name == "world" else 256
            layout = (f"parallel={options}", f"train.batch_size={batch}", f"train.seed={seed}")
            run = train_once(folder / f"{options}-{seed}", *overrides, *layout)
            test = run.summary["test"]
            losses[name].append(test["loss"])
            row: Row = {"seed": seed, "run": name, "rows per step": 256}
            rows.append({**row, **{key: f"{test[key]:.4f}" for key in ("loss", "auc")}})
    world, plain = mean(losses["world"]), mean(losses["one process"])
    text = f"Means: {world:.4f} and {plain:.4f}, {world / plain - 1:+.3%}."
    return {"Test scores": Part(rows, text)}


MEASURES = {
    "bytes": measure_bytes,
    "cpu": measure_cpu,
    "start": measure_start,
    "quality": measure_quality,
}

if __name__ == "__main__":
    main()
