"""The tables of the DCT paper from runs: `python scripts/paper_tables.py FOLDER... --output t.md`.

Every complete run below the folders becomes part of a row, and the runs of a row are its seeds.
A row stands in the table of the paper that compresses the same thing, beside the paper's figures
where it has that row. The baseline of a run is the one of its seed, with the same data in the same
order; it is found by configuration, in whatever folder it lies.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from statistics import mean, stdev
from typing import Any, final

from paper_numbers import BASELINE, TABLES, TITLES, Point, Scores

from dlrm_hybrid.bench.table import Row, section

FLOAT32 = "float32"
PAPERS_LIFESPAN = 1000
PAPERS_CUTS: list[list[str]] = [[], ["bottom.2"], ["bottom.2", "top.2"]]
ON_THE_WIRE = ("comm_precision", "deduplicate")  # compress, as a row may and its baseline need not
UNUSED_OF_DATA = ("prepared", "raw", "processes", "parquet", "block_bytes")  # decide no row


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a table needs of one run.

    Attributes:
        folder: where it lies.
        setting: all that a run shares with its baseline but the seed, as text.
        seed: of weights and of the order of the rows.
        table: number of the paper's table that it belongs to; 0 for a baseline.
        sparsity: what was dropped, as the row's name says it.
        point: the same as the paper names it; None where it has no such row.
        workers: stages of the model.
        scores: of its end.
        sent: share of the numbers that left, of gradients and of activations; None if all did.
        words: the setting for a person.
    """

    folder: Path
    setting: str
    seed: int
    table: int
    sparsity: str
    point: Point | None
    workers: int
    scores: Scores
    sent: tuple[float | None, float | None]
    words: str


def main() -> None:
    """Read the folders of the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    parser.add_argument("--output", type=Path, required=True, help="a Markdown file")
    arguments = parser.parse_args()
    runs = [run for folder in arguments.folders for run in read(folder)]
    settings = dict.fromkeys(run.setting for run in runs)
    pages = [page([run for run in runs if run.setting == setting]) for setting in settings]
    arguments.output.write_text("\n".join(pages), encoding="utf-8")


def read(folder: Path) -> Iterator[Run]:
    """All complete runs in a folder and those below it."""
    for path in sorted(folder.rglob("summary.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        if summary["status"] == "complete":
            config = json.loads(path.with_name("config.json").read_text(encoding="utf-8"))
            yield described(path.parent, config, summary)


def described(folder: Path, config: Mapping[str, Any], summary: Mapping[str, Any]) -> Run:
    """What `config.json` and `summary.json` say of a run."""
    gradient, activation = config["gradient"], config["activation"]
    of_gradients = gradient["sparsity"]
    cuts: list[str] = config["parallel"]["cuts"]
    of_cuts: float | list[float] = activation["sparsity"]
    narrow = [values["precision"] != FLOAT32 for values in (gradient, config["pull"], activation)]
    compressed = (
        of_gradients > 0 or any(narrow[:2]),
        activation["name"] == "dct" and (of_cuts != 0 or narrow[2]),
    )
    table = {(True, False): 2, (False, True): 1, (True, True): 3, (False, False): 0}[compressed]
    table = {"sketch": 6, "gradient_topk": 7}.get(activation["name"], table)
    train, test, compression = summary["train"], summary["test"], summary["compression"]
    trainers = config["parallel"]["trainers"]
    words = (
        f"{config['data']['name']}, {summary['samples']:,} training rows, {summary['steps']:,} "
        f"steps of {trainers} × {config['train']['batch_size']}"
    )
    return Run(
        folder=folder,
        setting=_setting(config),
        seed=config["train"]["seed"],
        table=table,
        sparsity=_sparsity(table, of_gradients, of_cuts) + _details(config),
        point=_point(table, of_gradients, of_cuts, cuts),
        workers=len(cuts) + 1,
        scores=Scores(train["loss"], 100 * train["accuracy"], test["loss"], 100 * test["accuracy"]),
        sent=(
            compression["gradient_density"] if compressed[0] else None,
            compression["activation_density"] if activation["name"] != "none" else None,
        ),
        words=words,
    )


def page(runs: Sequence[Run]) -> str:
    """All tables of one setting."""
    baselines = _baselines(runs)
    text = f"\n# {runs[0].words}\n"
    for table, title in TITLES.items():
        rows: defaultdict[tuple[int, str], list[Run]] = defaultdict(list)
        for run in runs:
            if run.table == table:
                rows[run.workers, run.sparsity].append(run)
        if rows:
            first = _row(table, list(baselines.values()), baselines)
            others = [_row(table, rows[key], baselines) for key in sorted(rows)]
            text += section(f"Table {table}. {title}", [first, *others], "")
    return text


def _baselines(runs: Iterable[Run]) -> dict[int, Run]:
    """By seed; several of one seed, such as those of every sweep, must agree."""
    found: dict[int, Run] = {}
    for run in runs:
        if run.table:
            continue
        other = found.setdefault(run.seed, run)
        if not isclose(run.scores.test_loss, other.scores.test_loss, rel_tol=1e-9):
            raise SystemExit(f"{run.folder} and {other.folder}: two baselines that differ")
    return found


def _row(table: int, runs: Sequence[Run], baselines: Mapping[int, Run]) -> Row:
    runs = sorted(runs, key=lambda run: run.seed)
    if len({run.seed for run in runs}) < len(runs):
        raise SystemExit(f"{', '.join(str(run.folder) for run in runs)}: one row, one seed")
    one = runs[0]
    paper = TABLES[table].get(one.point) if one.table and one.point else None
    if not one.table:
        paper = BASELINE
    changes = [
        100 * (run.scores.test_loss / baselines[run.seed].scores.test_loss - 1)
        for run in runs
        if one.table and run.seed in baselines
    ]
    columns = list(zip(*(run.scores for run in runs), strict=True))
    row = {
        "sparsity": one.sparsity if one.table else "baseline",
        "workers": one.workers if one.table else None,
        "train loss": _spread(columns[0], 4),
        "train acc. %": _spread(columns[1], 2),
        "test loss": _spread(columns[2], 4),
        "test acc. %": _spread(columns[3], 2),
        "against baseline, %": _spread(changes, 2, "+") if changes else None,
        "sent of gradients, activations, %": _sent(runs) if one.table else None,
        "paper: train": f"{paper.train_loss:.4f}, {paper.train_accuracy:.2f} %" if paper else None,
        "paper: test": f"{paper.test_loss:.4f}, {paper.test_accuracy:.2f} %" if paper else None,
        "paper: against baseline, %": None,
        "seeds": len(runs),
    }
    if paper and one.table:
        change = 100 * (paper.test_loss / BASELINE.test_loss - 1)
        row["paper: against baseline, %"] = f"{change:+z.2f}"
    return row


def _setting(config: Mapping[str, Any]) -> str:
    data = {key: value for key, value in config["data"].items() if key not in UNUSED_OF_DATA}
    train = {key: config["train"][key] for key in ("batch_size", "epochs", "steps")}
    tables = {key: value for key, value in config["embedding"].items() if key not in ON_THE_WIRE}
    shared = [config[key] for key in ("model", "optimizer", "precision", "sync")]
    return json.dumps([data, train, tables, shared, config["parallel"]["trainers"]])


def _point(
    table: int, of_gradients: float, of_cuts: float | list[float], cuts: list[str]
) -> Point | None:
    if table == 2:
        return Point(of_gradients, len(cuts) + 1)
    if isinstance(of_cuts, list) or (table == 3 and of_cuts != of_gradients):
        return None
    if cuts not in PAPERS_CUTS:
        return None
    return Point(of_cuts, len(cuts) + 1)


def _sparsity(table: int, of_gradients: float, of_cuts: float | list[float]) -> str:
    each = of_cuts if isinstance(of_cuts, list) else [of_cuts]
    activations = ", ".join(_percent(one) for one in each)
    if table == 2:
        return _percent(of_gradients)
    if table != 3 or of_cuts == of_gradients:
        return activations
    return f"activations {activations}; gradients {_percent(of_gradients)}"


def _details(config: Mapping[str, Any]) -> str:
    """What else is not as in the paper."""
    gradient = config["gradient"]
    told = [gradient, config["activation"], config["pull"]]
    precisions = {values["precision"] for values in told} - {FLOAT32}
    details = sorted(precisions)
    if config["parallel"]["cuts"] not in PAPERS_CUTS:
        details.append(f"after {', '.join(config['parallel']['cuts'])}")
    if gradient["name"] == "dct" and gradient["lifespan"] != PAPERS_LIFESPAN:
        details.append(f"L = {gradient['lifespan']}")
    return "".join(f", {detail}" for detail in details)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def _sent(runs: Sequence[Run]) -> str:
    return ", ".join(
        f"{100 * mean(share for share in shares if share is not None):.3g}"
        if None not in shares
        else "all"
        for shares in zip(*(run.sent for run in runs), strict=True)
    )


def _spread(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean and, of several, the sample's standard deviation."""
    text = f"{mean(values):{sign}z.{digits}f}"
    return f"{text} ± {stdev(values):.{digits}f}" if len(values) > 1 else text


if __name__ == "__main__":
    main()
