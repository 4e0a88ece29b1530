"""What a table of the paper needs of a run: pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, final

from paper_numbers import Point, Scores

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.summary import COMPLETE

FLOAT32 = "float32"
PAPERS_METHODS = ("none", "dct")
PAPERS_LIFESPAN = 1000
PAPERS_CUTS: list[list[str]] = [[], ["bottom.2"], ["bottom.2", "top.2"]]
ON_THE_WIRE = ("comm_precision", "deduplicate")  # compress, as a row may and its baseline need not
UNUSED_OF_DATA = ("prepared", "raw", "processes", "parquet", "block_bytes")  # decide no row


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
    of_gradients = gradient["sparsity"]
    cuts: list[str] = config["parallel"]["cuts"]
    of_cuts: float | list[float] = activation["sparsity"]
    narrow = [values["precision"] != FLOAT32 for values in (gradient, config["pull"], activation)]
    compressed = (
        gradient["name"] not in PAPERS_METHODS or of_gradients > 0 or any(narrow[:2]),
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
    details: list[str] = sorted(precisions)
    if gradient["name"] not in PAPERS_METHODS:
        details.append(gradient["name"])
    aggregation = gradient.get("aggregation") or "own"  # older runs have no such key
    if aggregation != "own":
        details.append(aggregation)
    if config["parallel"]["cuts"] not in PAPERS_CUTS:
        details.append(f"after {', '.join(config['parallel']['cuts'])}")
    if gradient["name"] == "dct" and gradient["lifespan"] != PAPERS_LIFESPAN:
        details.append(f"L = {gradient['lifespan']}")
    return "".join(f", {detail}" for detail in details)


def _percent(share: float) -> str:
    return f"{100 * share:.3g} %"
