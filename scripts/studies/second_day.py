"""Measures what a model of yesterday is worth: the log-loss of the next day of a drifting log.

    python scripts/studies/second_day.py FOLDER --days 7 --rows 2000000

Each day four models learn, and are scored on the day after: one that goes on from yesterday's with
rows for new ids, one that goes on without them, one from nothing on this day alone, and one from
nothing on all days so far. `drifting.py` writes the log. `--more optimizer.lr=0.05` goes to each
run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from drifting import arguments, log_of, write

from dlrm_hybrid.cli.main import run
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.types import DlrmError

MODELS = {
    "goes on, tables grow": ("grown", ()),
    "goes on, tables stay": ("fixed", ("data.grow=false",)),
    "this day from nothing": ("alone", ()),
    "all days from nothing": ("all", ()),
}
OPTIONS = (
    *("data=table", "model=dlrm_small", "telemetry.tensorboard=false", "checkpoint.keep=1"),
    *("optimizer=adagrad", "optimizer.lr=0.02", "embedding.optimizer=rowwise_adagrad"),
    *("embedding.lr=0.05",),
)


def main() -> None:
    """Write the log, train all models of all days, print a row for each model."""
    parser = arguments(__doc__)
    parser.add_argument("--more", nargs="+", default=(), help="options of each run")
    options = parser.parse_args()
    best = write(log_of(options), options.folder / "log")
    days = range(1, options.days)
    found: dict[str, list[dict[str, Any]]] = {}
    for title, (name, keys) in MODELS.items():
        found[title] = [_day(options.folder, name, day, (*keys, *options.more)) for day in days]
    print(table(found, best[1:]).markdown())


def table(found: dict[str, list[dict[str, Any]]], best: Sequence[float]) -> Table:
    """A row for each model: log-loss of each next day, its mean, seconds and new rows a day."""
    heads = ("model", *(f"day {day}" for day in range(2, len(best) + 2)), "mean")
    rows = [
        [
            title,
            *(f"{one['loss']:.4f}" for one in days),
            f"{mean(one['loss'] for one in days):.4f}",
            f"{days[-1]['prepared']:.1f}",
            f"{days[-1]['trained']:.1f}",
            "–" if days[-1]["appended"] is None else f"{days[-1]['appended']:,}",
        ]
        for title, days in found.items()
    ]
    limit = ["nobody can do better", *(f"{one:.4f}" for one in best), f"{mean(best):.4f}"]
    last = ("s to prepare", "s to train", "new rows")
    return Table((*heads, *last), [*rows, [*limit, "–", "–", "–"]])


def _day(folder: Path, name: str, day: int, options: Sequence[str]) -> dict[str, Any]:
    """Train a model of a day and score it on the next one; the seconds are of the last day."""
    first = 1 if name == "all" else day
    files = [f"{folder}/log/day{one}.parquet" for one in range(first, day + 2)]
    before = folder / name / f"day{day - 1}"
    goes_on = name in ("grown", "fixed") and day > 1
    rows = [
        *OPTIONS,
        f"data.raw=[{','.join(files)}]",
        f"data.schema={folder}/log/day{day}.yaml",
        f"data.prepared={folder}/{name}/rows{day}",
        *(one for one in options if goes_on or not one.startswith("data.grow")),
    ]
    base = (f"data.base={before}",) if goes_on else ()
    resume = (f"checkpoint.resume={before}",) if goes_on else ()
    own = folder / name / f"day{day}"
    prepared = _seconds("prepare", *rows, *base)
    trained = _seconds("train", *rows, *resume, f"hydra.run.dir={own}")
    summary = json.loads((own / "summary.json").read_text())
    growth = summary["growth"]
    return {
        "loss": summary["test"]["loss"],
        "prepared": prepared,
        "trained": trained,
        "appended": growth and sum(one["appended"] for one in growth.values()),
    }


def _seconds(verb: str, *options: str) -> float:
    begun = time.perf_counter()
    if code := run(["dlrm_hybrid", verb, *options]):
        raise DlrmError(f"{verb} {' '.join(options)}: exit code {code}")
    return time.perf_counter() - begun


if __name__ == "__main__":
    main()
