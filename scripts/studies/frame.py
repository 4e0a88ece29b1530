"""Shared code of the studies: runs as a tidy pandas frame, names of methods, table, picture."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import pandas as pd
from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import save
from dlrm_hybrid.report.runs import Run, read_runs
from dlrm_hybrid.report.table import Table
from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import ConfigError

Found = TypeVar("Found")
Frame: TypeAlias = Any
"""A pandas DataFrame, whose own types pyright cannot follow."""
WHOLE, OWN, STAGE = "none", "own", "stage"
OWN_RULE = "histogram"  # of gradient=dct
CLIPPED = 2.5  # of gradient=terngrad
SIDCO_LETTERS = {"exponential": "E", "gamma": "GP", "pareto": "P"}
COLUMNS = (
    *("run", "method", "sparsity", "density", "trainers", "seed", "loss"),
    *("sent", "pulled", "gradient_push", "parameter_pull", "cpu_microseconds"),
)


def frame(runs: Sequence[Run]) -> Frame:
    """A row for each complete run.

    The columns: `run`, its number among `runs`; `method`, ordered, whole gradients first and others
    as they come; `sparsity`, `density` = 1 - sparsity, `trainers` and `seed` as configured; test
    `loss`; `sent`, the share of gradients that was sent, and `pulled`, that of weights that a
    version changed; bytes per sample of `gradient_push` and `parameter_pull`; `cpu_microseconds`
    per sample of all ranks. What was not counted is NaN.
    """
    rows: list[dict[str, Any]] = [
        _row(number, run) for number, run in enumerate(runs) if run.status == COMPLETE
    ]
    found = pd.DataFrame(rows, columns=list(COLUMNS))
    names = dict.fromkeys([WHOLE, *(str(row["method"]) for row in rows)])
    return found.assign(method=pd.Categorical(found["method"], list(names), ordered=True))


def _row(number: int, run: Run) -> dict[str, Any]:
    config, summary, sent = run.config, run.summary, sent_per_sample(run)
    return {
        "run": number,
        "method": method_of(config),
        "sparsity": round(1 - config["gradient"].get("density", 1.0), 9),
        "density": config["gradient"].get("density", 1.0),
        "trainers": config["parallel"].get("trainers", 1),
        "seed": config["train"]["seed"],
        "loss": summary["test"]["loss"],
        "sent": summary["compression"]["gradient_density"],
        "pulled": summary["network"].get("pull_density"),
        "gradient_push": sent.get("gradient_push"),
        "parameter_pull": sent.get("parameter_pull"),
        "cpu_microseconds": cpu_microseconds(run),
    }


def method_of(config: Mapping[str, Any]) -> str:
    """The choice of `gradient`, and what makes more of it than its name says.

    That is another rule than `dct` comes with, `union` where all trainers send what any of them
    has selected, `leader` where one of them selects for all, with `terngrad` that nothing is
    clipped or no scale shared, and the share of weights in a pull where that is limited.
    """
    gradient = config["gradient"]
    words: list[str] = [gradient["name"]]
    if words == ["dct"] and gradient["threshold"] != OWN_RULE:
        words.append(gradient["threshold"])
    words += aggregation_of(config)
    if gradient.get("clip", CLIPPED) is None:
        words.append("not clipped")
    if not gradient.get("sharing", True):
        words.append("own scales")
    left_out = config.get("pull", {}).get("sparsity")  # older runs have no such key
    if left_out is not None:
        words.append(f"pulls of {100 * (1 - left_out):.3g} %")
    return ", ".join(words)


def aggregation_of(config: Mapping[str, Any]) -> list[str]:
    """The choice of `gradient.aggregation`; nothing where each trainer selects for itself."""
    aggregation: str = config["gradient"].get("aggregation") or OWN  # TernGrad and others have none
    return [] if aggregation == OWN else [aggregation]


def estimator_of(config: Mapping[str, Any]) -> str:
    """What finds thresholds: a method, or the rule of `dct` where it finds one in every step."""
    gradient = config["gradient"]
    name: str = gradient["name"]
    if name == "dct" and gradient["lifespan"] == 1:
        name = gradient["threshold"]
    if name == "sidco":
        name += f"-{SIDCO_LETTERS[gradient.get('distribution', 'exponential')]}"
    return f"{name}, {STAGE}" if gradient.get("scope") == STAGE else name


def samples_of(run: Run) -> float:
    """Rows trained on while bytes and CPU time were counted."""
    return run.summary["samples_per_second"] * run.summary["seconds"]


def sent_per_sample(run: Run) -> dict[str, float]:
    """Bytes by class; empty where none were counted."""
    counted: Mapping[str, Any] = run.summary["network"]["by_class"] or {}
    return {name: one["bytes"] / samples_of(run) for name, one in counted.items()}


def counted_bytes(run: Run) -> dict[str, float]:
    """Bytes per sample by class, in words; raises ConfigError where none were counted."""
    sent = {name.replace("_", " "): number for name, number in sent_per_sample(run).items()}
    if not sent:
        raise ConfigError(f"{run.folder}: no bytes were counted, it is no world")
    return sent


def cpu_microseconds(run: Run) -> float:
    """CPU time per sample, of all ranks."""
    return 1e6 * run.summary["cpu"]["seconds"] / samples_of(run)


def arguments(about: str | None, *, has_picture: bool = True) -> argparse.ArgumentParser:
    """What a study takes: `--output`, where it draws one.

    Args:
        about: the docstring of its file.
        has_picture: whether it draws one.
    """
    parser = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if has_picture:
        parser.add_argument("--output", type=Path, required=True, help="a PNG or SVG file")
    return parser


def study(
    about: str | None,
    measure: Callable[[Sequence[Run]], Found],
    table: Callable[[Found], Table],
    picture: Callable[[Found], Figure] | None = None,
) -> None:
    """Read the runs that the command line names, write a picture, print a table.

    Args:
        about: the docstring of the study.
        measure: what it looks at in the runs.
        table: of that.
        picture: of that; None for none.
    """
    parser = arguments(about, has_picture=picture is not None)
    parser.add_argument("folders", nargs="+", type=Path, help="of runs or sweeps")
    options = parser.parse_args()
    found = measure(read_runs(options.folders))
    if picture is not None:
        save(picture(found), options.output)
    print(table(found).markdown(), end="")
