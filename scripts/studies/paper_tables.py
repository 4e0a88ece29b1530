"""Makes the tables of the DCT paper (Gupta et al., KDD 2021) from runs, beside its own figures.

    python scripts/studies/paper_tables.py FOLDER... --output tables.md

Every complete run below the folders belongs to a row of the table that compresses the same thing;
the runs of a row differ in their seeds. The baseline of a run has the same seed, and the same data
in the same order, in any of the folders.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple, final

from frame import aggregation_of

from dlrm_hybrid.report.measures import mean_spread
from dlrm_hybrid.report.runs import Run, read_runs
from dlrm_hybrid.report.table import MISSING, Table
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ConfigError

COLUMNS = (
    *("sparsity", "workers", "train loss", "train acc. %", "test loss", "test acc. %"),
    *("against baseline, %", "sent of gradients, activations, %"),
    *("paper: train", "paper: test", "paper: against baseline, %", "seeds"),
)
FLOAT32 = "float32"
PAPERS_METHODS = ("none", "dct")
PAPERS_LIFESPAN = 1000
PAPERS_CUTS: list[list[str]] = [[], ["bottom.2"], ["bottom.2", "top.2"]]
ON_THE_WIRE = ("comm_precision", "deduplicate")  # compress, as a row may and its baseline need not
UNUSED_OF_DATA = ("prepared", "raw", "processes", "parquet", "block_bytes")  # decide no row


class Scores(NamedTuple):
    """Losses in nats, accuracies in percent, of the end of one run."""

    train_loss: float
    train_accuracy: float
    test_loss: float
    test_accuracy: float


@final
class Point(NamedTuple):
    """One row of a table: what was dropped, and over how many model-parallel workers."""

    sparsity: float
    workers: int


BASELINE = Scores(0.4477, 79.23, 0.4538, 78.78)

TABLES: dict[int, dict[Point, Scores]] = {
    1: {
        Point(0.75, 2): Scores(0.4473, 79.29, 0.4532, 78.81),
        Point(0.90, 2): Scores(0.4472, 79.28, 0.4530, 78.81),
        Point(0.95, 2): Scores(0.4473, 79.24, 0.4534, 78.80),
        Point(0.98, 2): Scores(0.4505, 79.07, 0.4562, 78.61),
        Point(0.75, 3): Scores(0.4482, 79.19, 0.4536, 78.79),
        Point(0.90, 3): Scores(0.4479, 79.24, 0.4537, 78.78),
        Point(0.95, 3): Scores(0.4495, 79.18, 0.4546, 78.72),
    },
    2: {
        Point(0.75, 1): Scores(0.4478, 79.23, 0.4534, 78.81),
        Point(0.90, 1): Scores(0.4478, 79.22, 0.4536, 78.79),
        Point(0.95, 1): Scores(0.4479, 79.25, 0.4538, 78.79),
        Point(0.98, 1): Scores(0.4478, 79.23, 0.4537, 78.80),
        Point(0.995, 1): Scores(0.4482, 79.20, 0.4547, 78.75),
    },
    3: {
        Point(0.75, 3): Scores(0.4480, 79.23, 0.4535, 78.81),
        Point(0.90, 3): Scores(0.4481, 79.26, 0.4537, 78.78),
        Point(0.95, 3): Scores(0.4492, 79.19, 0.4548, 78.70),
    },
    6: {
        Point(0.50, 2): Scores(0.4569, 78.72, 0.4618, 78.37),
        Point(0.75, 2): Scores(0.4610, 78.53, 0.4656, 78.12),
        Point(0.90, 2): Scores(0.4685, 77.95, 0.4721, 77.78),
    },
    7: {
        Point(0.50, 2): Scores(0.4495, 79.07, 0.4561, 78.62),
        Point(0.75, 2): Scores(0.4516, 78.95, 0.4588, 78.48),
        Point(0.90, 2): Scores(0.4701, 77.76, 0.4789, 77.13),
    },
}
TITLES = {
    1: "DCT-MP: activations and their gradients",
    2: "DCT-DP: gradients of the weights",
    3: "DCT-MP and DCT-DP together",
    6: "Control: Gaussian sketches of activations",
    7: "Control: top-k of activation gradients with error feedback",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PaperRun:
    """One run in the words of the paper.

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

    folder: str
    setting: str
    seed: int
    table: int
    sparsity: str
    point: Point | None
    workers: int
    scores: Scores
    sent: tuple[float | None, float | None]
    words: str


def paper_runs(runs: Iterable[Run]) -> list[PaperRun]:
    """Those that are complete."""
    return [_described(run) for run in runs if run.status == COMPLETE]


def _described(run: Run) -> PaperRun:
    config, summary = run.config, run.summary
    gradient, activation = config["gradient"], config["activation"]
    of_gradients = round(1 - gradient.get("density", 1.0), 9)
    cuts: list[str] = config["parallel"].get("cuts", [])
    of_cuts: float | list[float] = activation.get("sparsity", 0.0)
    narrow = [
        values.get("precision", FLOAT32) != FLOAT32
        for values in (gradient, config["pull"], activation)
    ]
    compressed = (
        gradient["name"] not in PAPERS_METHODS or of_gradients > 0 or any(narrow[:2]),
        activation["name"] == "dct" and (of_cuts != 0 or narrow[2]),
    )
    table = {(True, False): 2, (False, True): 1, (True, True): 3, (False, False): 0}[compressed]
    table = {"sketch": 6, "gradient_topk": 7}.get(activation["name"], table)
    train, test, compression = summary["train"], summary["test"], summary["compression"]
    trainers = config["parallel"].get("trainers", 1)
    words = (
        f"{config['data']['name']}, {summary['samples']:,} training rows, {summary['steps']:,} "
        f"steps of {trainers} × {config['train']['batch_size']}"
    )
    return PaperRun(
        folder=str(run.folder),
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


def _setting(config: Mapping[str, Any]) -> str:
    data = {key: value for key, value in config["data"].items() if key not in UNUSED_OF_DATA}
    train = {key: config["train"][key] for key in ("batch_size", "epochs", "steps")}
    tables = {key: value for key, value in config["embedding"].items() if key not in ON_THE_WIRE}
    shared = [config[key] for key in ("model", "optimizer", "precision", "sync")]
    return json.dumps([data, train, tables, shared, config["parallel"].get("trainers", 1)])


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
    precisions = {values.get("precision", FLOAT32) for values in told} - {FLOAT32}
    details: list[str] = sorted(precisions)
    if gradient["name"] not in PAPERS_METHODS:
        details.append(gradient["name"])
    details += aggregation_of(config)
    if config["parallel"].get("cuts", []) not in PAPERS_CUTS:
        details.append(f"after {', '.join(config['parallel'].get('cuts', []))}")
    if gradient["name"] == "dct" and gradient["lifespan"] != PAPERS_LIFESPAN:
        details.append(f"L = {gradient['lifespan']}")
    return "".join(f", {detail}" for detail in details)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"


@final
@dataclass(frozen=True, slots=True)
class Setting:
    """Runs on the same rows with the same model.

    Attributes:
        words: which rows, how many steps.
        tables: by title; those that no run belongs to are left out.
    """

    words: str
    tables: Mapping[str, Table]


def settings(runs: Iterable[PaperRun]) -> list[Setting]:
    """The tables of each setting.

    Raises:
        ConfigError: two baselines of one seed differ, or a row has two runs of one seed.
    """
    found: defaultdict[str, list[PaperRun]] = defaultdict(list)
    for run in runs:
        found[run.setting].append(run)
    return [Setting(alike[0].words, _tables(alike)) for alike in found.values()]


def page(found: Iterable[Setting]) -> str:
    """The tables as Markdown."""
    texts: list[str] = []
    for setting in found:
        texts.append(f"# {setting.words}\n")
        for title, table in setting.tables.items():
            text = table.markdown()
            texts.append(f"## {title}\n\n{text}")
    return "\n".join(texts)


def _tables(runs: Sequence[PaperRun]) -> dict[str, Table]:
    baselines = _baselines(runs)
    found: dict[str, Table] = {}
    for number, title in TITLES.items():
        rows: defaultdict[tuple[int, str], list[PaperRun]] = defaultdict(list)
        for run in runs:
            if run.table == number:
                rows[run.workers, run.sparsity].append(run)
        if rows:
            cells = [_row(rows[key], baselines) for key in sorted(rows)]
            if baselines:
                cells.insert(0, _row(list(baselines.values()), baselines))
            found[f"Table {number}. {title}"] = Table(COLUMNS, tuple(cells))
    return found


def _baselines(runs: Iterable[PaperRun]) -> dict[int, PaperRun]:
    """By seed; several of one seed, such as those of every sweep, must agree."""
    found: dict[int, PaperRun] = {}
    for run in runs:
        if run.table:
            continue
        other = found.setdefault(run.seed, run)
        if not isclose(run.scores.test_loss, other.scores.test_loss, rel_tol=1e-9):
            raise ConfigError(f"{run.folder} and {other.folder}: two baselines that differ")
    return found


def _row(runs: Sequence[PaperRun], baselines: Mapping[int, PaperRun]) -> tuple[str, ...]:
    runs = sorted(runs, key=lambda run: run.seed)
    if len({run.seed for run in runs}) < len(runs):
        raise ConfigError(f"{', '.join(run.folder for run in runs)}: one row, one seed")
    one = runs[0]
    changes = [
        100 * (run.scores.test_loss / baselines[run.seed].scores.test_loss - 1)
        for run in runs
        if one.table and run.seed in baselines
    ]
    columns = list(zip(*(run.scores for run in runs), strict=True))
    return (
        one.sparsity if one.table else "baseline",
        str(one.workers) if one.table else MISSING,
        *(
            mean_spread(column, digits)
            for column, digits in zip(columns, (4, 2, 4, 2), strict=True)
        ),
        mean_spread(changes, 2, "+") if changes else MISSING,
        _sent(runs) if one.table else MISSING,
        *_of_paper(one),
        str(len(runs)),
    )


def _of_paper(run: PaperRun) -> tuple[str, str, str]:
    """Training, test, and test log-loss against the paper's baseline."""
    paper = BASELINE
    if run.table:
        row = TABLES[run.table].get(run.point) if run.point else None
        if row is None:
            return MISSING, MISSING, MISSING
        paper = row
    change = 100 * (paper.test_loss / BASELINE.test_loss - 1)
    return (
        f"{paper.train_loss:.4f}, {paper.train_accuracy:.2f} %",
        f"{paper.test_loss:.4f}, {paper.test_accuracy:.2f} %",
        f"{change:+z.2f}" if run.table else MISSING,
    )


def _sent(runs: Sequence[PaperRun]) -> str:
    return ", ".join(
        f"{100 * mean(share for share in shares if share is not None):.3g}"
        if None not in shares
        else "all"
        for shares in zip(*(run.sent for run in runs), strict=True)
    )


def main() -> None:
    """Read the folders of the command line and write the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    parser.add_argument("--output", type=Path, required=True, help="a Markdown file")
    arguments = parser.parse_args()
    text = page(settings(paper_runs(read_runs(arguments.folders))))
    arguments.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
