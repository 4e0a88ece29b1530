"""Measures what a model of yesterday is worth: its score on the next day of a log.

    python scripts/rows/second_day.py FOLDER --days 7 --rows 2000000
    python scripts/rows/second_day.py FOLDER --days 7 --movielens ml-100k/u.data --score auc

Each day four models learn, and are scored on the day after: one that goes on from yesterday's with
rows for new ids, one that goes on without them, one from nothing on this day alone, and one from
nothing on all days so far. The log is that of `drifting.py`, or the ratings of MovieLens-100k (of
users and items alone, 4 and 5 against 1 to 3) in as many parts in order of time.
`--more optimizer.lr=0.05` goes to each run.
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
    "grown": ("goes on, tables grow", ()),
    "fixed": ("goes on, tables stay", ("data.grow=false",)),
    "alone": ("this day from nothing", ()),
    "all": ("all days from nothing", ()),
}
OPTIONS = (
    *("data=table", "telemetry.tensorboard=false", "checkpoint.keep=1", "train.evaluate_every=0"),
    *("optimizer=adagrad", "optimizer.lr=0.02", "embedding.optimizer=rowwise_adagrad"),
    *("embedding.lr=0.05",),
)
SMALL = ("model=dlrm_small",)
# Without a bottom MLP a dot product of two vectors would be the top MLP's one input.
CROSSED = (
    *("model=dcnv2", "model.bottom=[]", "model.embedding_dim=8", "model.top=[16,1]"),
    *("model.cross.layers=1", "model.cross.rank=8"),
)
RATINGS = """
label: {{column: rating, above: 3}}
dense: []
categorical:
  - {{name: user, kind: integer}}
  - {{name: item, kind: integer}}
ignore: [time]
names: [user, item, rating, time]
delimiter: "\\t"
split: {{by: file, test: [{test}]}}
"""


def main() -> None:
    """Write the log, train all models of all days, print a row for each model."""
    parser = arguments(__doc__)
    parser.add_argument("--movielens", type=Path, help="u.data, whose ratings are the log")
    parser.add_argument("--score", choices=("loss", "auc"), default="loss")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--more", nargs="+", default=(), help="options of each run")
    options = parser.parse_args()
    log: Path = options.folder / "log"
    if options.movielens is None:
        best = write(log_of(options), log)[1:]
        options.more = (*SMALL, *options.more)
    else:
        best = write_ratings(options.movielens, options.days, log)
        options.more = (*CROSSED, *options.more)
    found: dict[str, list[dict[str, Any]]] = {}
    for name in options.models:
        title, keys = MODELS[name]
        found[title] = [
            _day(options.folder, name, day, options.score, (*keys, *options.more))
            for day in range(1, options.days)
        ]
    print(table(found, best if options.score == "loss" else ()).markdown())


def write_ratings(source: Path, days: int, folder: Path) -> tuple[float, ...]:
    """Write as many parts of MovieLens' ratings in order of time, and a schema of each.

    Returns:
        no losses: the best that anybody can reach is not known.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = source.read_text().splitlines()
    lines.sort(key=lambda line: int(line.split("\t")[3]))  # stable: ties stay in the file's order
    for day in range(1, days + 1):
        first, end = ((len(lines) * one) // days for one in (day - 1, day))
        (folder / f"day{day}.csv").write_text("\n".join(lines[first:end]) + "\n")
        (folder / f"day{day}.yaml").write_text(RATINGS.format(test=f"day{day + 1}.csv"))
    return ()


def table(found: dict[str, list[dict[str, Any]]], best: Sequence[float]) -> Table:
    """A row for each model: score of each next day, its mean, seconds and new rows a day."""
    days = len(next(iter(found.values())))
    heads = ("model", *(f"day {day}" for day in range(2, days + 2)), "mean")
    rows = [
        [
            title,
            *(f"{one['score']:.4f}" for one in days),
            f"{mean(one['score'] for one in days):.4f}",
            f"{days[-1]['prepared']:.1f}",
            f"{days[-1]['trained']:.1f}",
            "–" if days[-1]["appended"] is None else f"{days[-1]['appended']:,}",
        ]
        for title, days in found.items()
    ]
    if best:
        limit = ["nobody can do better", *(f"{one:.4f}" for one in best), f"{mean(best):.4f}"]
        rows.append([*limit, "–", "–", "–"])
    return Table((*heads, "s to prepare", "s to train", "new rows"), rows)


def _day(folder: Path, name: str, day: int, score: str, options: Sequence[str]) -> dict[str, Any]:
    """Train a model of a day and score it on the next one; the seconds are of the last day."""
    first = 1 if name == "all" else day
    (ending,) = {one.suffix for one in (folder / "log").glob("day*") if one.suffix != ".yaml"}
    files = [f"{folder}/log/day{one}{ending}" for one in range(first, day + 2)]
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
        "score": summary["test"][score],
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
