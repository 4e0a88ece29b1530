"""The figures of a run that tables show, with names, units and digits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any, final

from dlrm_hybrid.report.table import MISSING

Summary = Mapping[str, Any]


@final
@dataclass(frozen=True, slots=True)
class Measure:
    """One column of figures.

    Attributes:
        key: its name in a CSV file.
        title: its name in a table, with the unit.
        pick: its value in a summary; None where it was not measured.
        show: a value as text.
    """

    key: str
    title: str
    pick: Callable[[Summary], float | None]
    show: Callable[[float], str]

    def text(self, summary: Summary) -> str:
        """The value as text, a dash where there is none."""
        value = self.pick(summary)
        return MISSING if value is None else self.show(value)


def whole(value: float) -> str:
    """1,234."""
    return f"{value:,.0f}"


def score(value: float) -> str:
    """0.1234."""
    return f"{value:.4f}"


def percent(value: float) -> str:
    """94.2 %, two or three digits."""
    return f"{value:.1%}" if value < 0.9995 else f"{value:.0%}"


def digits(value: float) -> str:
    """Three significant digits, groups of three in large numbers."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}"


def mean_spread(values: Sequence[float], places: int, sign: str = "") -> str:
    """Mean and, of several, the sample's standard deviation."""
    text = f"{mean(values):{sign}z.{places}f}"
    return f"{text} ± {stdev(values):.{places}f}" if len(values) > 1 else text


def dense_ratio(summary: Summary) -> float | None:
    """How many times more bytes plain float32 would have been."""
    sent, dense = (summary["network"][key] for key in ("bytes_total", "dense_equivalent_bytes"))
    return dense / sent if sent and dense is not None else None


def _at(section: str, name: str) -> Callable[[Summary], float | None]:
    return lambda summary: summary[section][name]


STEPS = Measure("steps", "steps", lambda summary: summary["steps"], whole)
TRAIN_LOSS = Measure("train_loss", "training loss", _at("train", "loss"), score)
TEST_LOSS = Measure("test_loss", "test log-loss", _at("test", "loss"), score)
AUC = Measure("test_auc", "AUC", _at("test", "auc"), score)
ACCURACY = Measure("test_accuracy", "accuracy", _at("test", "accuracy"), score)
BYTES = Measure("bytes_per_sample", "bytes/sample", _at("network", "bytes_per_sample"), digits)
RATIO = Measure("dense_ratio", "dense ÷ sent", dense_ratio, lambda value: f"{value:.1f}×")
NETWORK_USE = Measure("network_utilization", "network use", _at("network", "utilization"), percent)
CPU_USE = Measure("cpu_utilization", "CPU use", _at("cpu", "utilization"), percent)
SPEED = Measure(
    "samples_per_second", "samples/s", lambda summary: summary["samples_per_second"], digits
)
SECONDS = Measure("seconds", "training s", lambda summary: summary["seconds"], digits)

SWEEP = (TEST_LOSS, AUC, ACCURACY, BYTES, RATIO, SPEED)
COMPARISON = (
    *(STEPS, TRAIN_LOSS, TEST_LOSS, AUC, ACCURACY),
    *(BYTES, RATIO, NETWORK_USE, CPU_USE, SPEED, SECONDS),
)
