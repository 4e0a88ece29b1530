"""Measures of runs that tables show, with names, units and digits; runs as pandas frames."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import mean, stdev
from typing import Any, cast, final

import pandas as pd

from dlrm_hybrid.report.labels import labels
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.report.table import MISSING
from dlrm_hybrid.telemetry.events import Kind

Summary = Mapping[str, Any]
Row = Mapping[Any, Any]


@final
@dataclass(frozen=True, slots=True)
class Measure:
    """A column of a table of runs: one figure of each summary.

    Attributes:
        key: name in a CSV file.
        title: name in a table, with the unit.
        pick: takes the value from a summary; None if it was not measured.
    """

    key: str
    title: str
    pick: Callable[[Summary], float | None]
    show: Callable[[float], str]


def integer(value: float) -> str:
    """Format a rounded number with separators of thousands: 1,234."""
    return f"{value:,.0f}"


def score(value: float) -> str:
    """Format a score with four decimal places: 0.1234."""
    return f"{value:.4f}"


def percent(value: float) -> str:
    """Format a share in percent, with one decimal below 100: 94.2%."""
    return f"{value:.1%}" if value < 0.9995 else f"{value:.0%}"


def digits(value: float) -> str:
    """Format three significant digits; whole numbers from 100, with separators of thousands."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def mean_spread(values: Sequence[float], decimals: int, sign: str = "") -> str:
    """Format the mean and, of several values, the sample standard deviation."""
    text = f"{mean(values):{sign}z.{decimals}f}"
    return f"{text} ± {stdev(values):.{decimals}f}" if len(values) > 1 else text


def dense_ratio(summary: Summary) -> float | None:
    """Compression ratio: bytes as plain float32 over bytes sent; None if not counted."""
    sent, dense = (summary["network"][key] for key in ("bytes_total", "dense_equivalent_bytes"))
    return dense / sent if sent and dense is not None else None


def _at(section: str, name: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[section][name]


def _validation(name: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary["validation"][name] if "validation" in summary else None


def _counted(summary: Summary) -> float | None:
    """Bytes per sample of the counted classes; None if all classes are counted."""
    network = summary["network"]
    is_all = network["bytes_per_sample"] is not None
    return None if is_all else network.get("counted_bytes_per_sample")


STEPS = Measure("steps", "steps", lambda summary: summary["steps"], integer)
TRAIN_LOSS = Measure("train_loss", "training loss", _at("train", "loss"), score)
VALIDATION = (
    Measure("validation_loss", "validation log-loss", _validation("loss"), score),
    Measure("validation_auc", "validation AUC", _validation("auc"), score),
)
"""Measures of the validation part, which most data sets lack."""
TEST_LOSS = Measure("test_loss", "test log-loss", _at("test", "loss"), score)
AUC = Measure("test_auc", "AUC", _at("test", "auc"), score)
GAUC = Measure("test_gauc", "GAUC", lambda summary: summary["test"].get("gauc"), score)
ACCURACY = Measure("test_accuracy", "accuracy", _at("test", "accuracy"), score)
BYTES = Measure("bytes_per_sample", "bytes/sample", _at("network", "bytes_per_sample"), digits)
COUNTED = Measure(
    "counted_bytes_per_sample",
    "bytes/sample without embedding",
    _counted,
    digits,
)
"""The measure for a world in one process whose trainers share tables."""
RATIO = Measure("dense_ratio", "dense ÷ sent", dense_ratio, lambda value: f"{value:.1f}×")
NETWORK_USE = Measure("network_utilization", "network use", _at("network", "utilization"), percent)
CPU_USE = Measure("cpu_utilization", "CPU use", _at("cpu", "utilization"), percent)
SPEED = Measure(
    "samples_per_second", "samples/s", lambda summary: summary["samples_per_second"], digits
)
SECONDS = Measure("seconds", "training s", lambda summary: summary["seconds"], digits)

SWEEP = (*VALIDATION, TEST_LOSS, AUC, GAUC, ACCURACY, BYTES, COUNTED, RATIO, SPEED)
COMPARISON = (
    *(STEPS, TRAIN_LOSS, *VALIDATION, TEST_LOSS, AUC, GAUC, ACCURACY),
    *(BYTES, COUNTED, RATIO, NETWORK_USE, CPU_USE, SPEED, SECONDS),
)

RARE = (*VALIDATION, GAUC, COUNTED)
"""Measures that have columns only if a run has values."""


def figures(summaries: Sequence[Summary | None]) -> pd.DataFrame:
    """A row for each summary with every measure of the comparison; NaN if not measured."""
    data = pd.DataFrame(
        {
            measure.key: [None if x is None else measure.pick(x) for x in summaries]
            for measure in COMPARISON
        },
        dtype=float,
    )
    rare = [measure.key for measure in RARE if data[measure.key].dropna().empty]
    return data.drop(columns=rare)


def rows_of(data: pd.DataFrame) -> list[Row]:
    """The rows of a frame as mappings by column name."""
    return cast("list[Row]", data.to_dict("records"))


def means(groups: Sequence[str], rows: Sequence[Row]) -> list[dict[str, str]]:
    """Mean ± sample standard deviation of each measure, as text, for groups of several rows."""
    shown: list[dict[str, str]] = []
    for name in dict.fromkeys(groups):
        group_rows = [row for group, row in zip(groups, rows, strict=True) if group == name]
        if len(group_rows) > 1:
            spreads = {measure.title: _spread(measure, group_rows) for measure in COMPARISON}
            shown.append({"over seeds": name, "runs": str(len(group_rows)), **spreads})
    titles = {title for row in shown for title, text in row.items() if text != MISSING}
    return [{title: text for title, text in row.items() if title in titles} for row in shown]


def _spread(measure: Measure, rows: Sequence[Row]) -> str:
    values = [value for row in rows if not isnan(value := float(row.get(measure.key, nan)))]
    if len(values) < 2:
        return MISSING
    return f"{measure.show(mean(values))} ± {measure.show(stdev(values))}"


def texts(data: pd.DataFrame) -> pd.DataFrame:
    """Format the columns of `figures`, under their titles; a dash for NaN."""
    measures = {measure.key: measure for measure in COMPARISON}
    return pd.DataFrame(
        {
            measure.title: [MISSING if pd.isna(value) else measure.show(value) for value in values]
            for key, values in data.items()
            if (measure := measures.get(str(key)))
        },
        index=data.index,
    )


def nonzero(data: pd.DataFrame) -> pd.DataFrame:
    """Drop the columns that are 0 or NaN in every row."""
    return data.drop(columns=[name for name, values in data.items() if not values.any()])


def frame(runs: Sequence[Run]) -> pd.DataFrame:
    """A row for each run by label: status and every measure; NaN if not measured."""
    data = figures([run.summary for run in runs]).set_axis(labels(runs))
    data.insert(0, "status", [run.status for run in runs])
    return data.rename_axis("run")


def points(runs: Sequence[Run], kind: Kind) -> pd.DataFrame:
    """A row for each event of a kind: `run`, `step`, and its values as columns."""
    rows: list[dict[str, Any]] = [
        {"run": label, "step": event.step, **event.values}
        for label, run in zip(labels(runs), runs, strict=True)
        for event in run.events
        if event.kind is kind
    ]
    return pd.DataFrame(rows)
