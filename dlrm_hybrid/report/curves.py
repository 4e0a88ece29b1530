"""From the events of a run to lines that can be drawn: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from statistics import median
from typing import Any

import numpy as np
import pandas as pd

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind, curve, part_of
from dlrm_hybrid.types import ScoredPart

MAX_POINTS = 120  # more cannot be distinguished in a picture


class Axis(Enum):
    """What a loss is drawn over: its meaning in words."""

    STEPS = "training steps"
    SECONDS = "seconds of training"
    BYTES = "bytes sent in training"


Curve = pd.Series
"""Points of one line: values by their position on the x-axis, left to right."""

Band = Mapping[str, Curve]
"""The line `middle` between the lines `low` and `high`."""


def training_loss(run: Run, axis: Axis) -> Curve | None:
    """Mean loss of the steps up to each point; None where the axis was not measured."""
    position = _positions(run, axis)
    points = curve(run.events)
    if position is None or not points:
        return None
    parts = _parts(points)
    return pd.Series([_mean(part) for part in parts], [position(part[-1]) for part in parts])


def evaluated_loss(run: Run, axis: Axis) -> Curve | None:
    """Log-loss of each evaluation that decides; None without one, or with no such axis measured.

    Those are on the part to validate, or on the test part of a run that has scored no other.
    """
    position = _positions(run, axis)
    evaluated = [event for event in run.events if event.kind is Kind.EVALUATED]
    validated = [event for event in evaluated if part_of(event) is ScoredPart.VALIDATION]
    points = validated or evaluated
    if position is None or not points:
        return None
    return pd.Series(
        [event.values["log_loss"] for event in points], [position(event) for event in points]
    )


def density(run: Run, prefix: str) -> Curve | None:
    """Share of the elements sent up to each point, of all names with this prefix together."""
    shares = pd.Series(
        {
            part[-1].step: compression.density((event.values["of"] for event in part), prefix)
            for part in _parts(_compression(run))
        },
        dtype=float,
    ).dropna()
    return None if shares.empty else shares


def threshold(run: Run, prefix: str) -> Band | None:
    """Thresholds of all names with this prefix: the median, the lowest and the highest by step."""
    found = {
        part[-1].step: values
        for part in _parts(_compression(run))
        if (
            values := [
                value["threshold"]
                for name, value in part[-1].values["of"].items()
                if name.startswith(prefix) and value["threshold"]
            ]
        )
    }
    figures: Mapping[str, Callable[[list[float]], float]]
    figures = {"middle": median, "low": min, "high": max}
    if not found:
        return None
    return {
        name: pd.Series({step: figure(values) for step, values in found.items()})
        for name, figure in figures.items()
    }


def _compression(run: Run) -> list[Event]:
    return [event for event in run.events if event.kind is Kind.COMPRESSION]


def _parts(points: Sequence[Event]) -> list[Sequence[Event]]:
    """Neighbours together, so that at most `MAX_POINTS` are left."""
    size = -(-len(points) // MAX_POINTS)
    return [points[start : start + size] for start in range(0, len(points), size or 1)]


def _mean(points: Sequence[Event]) -> float:
    rows = sum(point.values["rows"] for point in points)
    return sum(point.values["loss"] * point.values["rows"] for point in points) / (rows or 1)


def _positions(run: Run, axis: Axis) -> Callable[[Event], float] | None:
    """Gives the position of an event on the axis."""
    if axis is Axis.STEPS:
        return lambda event: event.step
    if axis is Axis.BYTES:
        per_sample = run.summary["network"]["bytes_per_sample"]
        return None if per_sample is None else lambda event: event.values["samples"] * per_sample
    seconds, at_step = 0.0, {0: 0.0}
    for event in run.events:
        if event.kind is Kind.PROGRESS:
            seconds += event.values["timed_seconds"]
        at_step[event.step] = seconds
    return (lambda event: at_step[event.step]) if seconds else None


MOST_WINDOWS = 60  # steps of single batches are noise; what a person looks for is longer
START, SECONDS = 0, 1  # columns of a recorded series

Point = tuple[float, float, float]
"""Start since 1970, seconds, and what was used in them."""


def network_use(run: Run) -> dict[str, Curve]:
    """Percent of its link's rate, by role of each rank with a link of known rate.

    Of each window the busier direction counts. The busiest rank is the first.
    """
    points: dict[str, list[Point]] = {}
    for rank in _ranks(run):
        interface = rank.get("interface")
        if interface is not None and interface["rate_bits_per_second"]:
            rate_bytes = interface["rate_bits_per_second"] / 8
            points.setdefault(rank["role"], []).extend(
                # Where a point joins windows, the busier bytes are more than either sum.
                (start, seconds, max(num_bytes) / rate_bytes)
                for start, seconds, *num_bytes in interface["series"]
            )
    busy = {role: _mean_use(series) for role, series in points.items() if series}
    order = sorted(busy, key=lambda role: -busy[role])
    return _curves({role: points[role] for role in order})


def cpu_use(run: Run) -> dict[str, Curve]:
    """Percent of a core, by role of each rank."""
    points: dict[str, list[Point]] = {}
    for rank in _ranks(run):
        points.setdefault(rank["role"], []).extend(
            (start, seconds, used) for start, seconds, used in rank.get("cpu_series") or ()
        )
    return _curves({role: series for role, series in points.items() if series})


def cpu_use_of_all(run: Run) -> Curve | None:
    """Percent of the cores that the ranks can use, all of them together."""
    used = pd.DataFrame(cpu_use(run))
    cores = min(len(used.columns), run.environment.get("cores", len(used.columns)))
    return None if used.empty else used.dropna().sum(axis="columns") / cores


def _ranks(run: Run) -> list[Mapping[str, Any]]:
    return [event.values for event in run.events if event.kind is Kind.RANK]


def _mean_use(series: Sequence[Point]) -> float:
    return sum(used for *_, used in series) / (sum(seconds for _, seconds, _ in series) or 1.0)


def _curves(points: Mapping[str, Sequence[Point]]) -> dict[str, Curve]:
    """All over the same times, in seconds since the first point; none where none trained."""
    if not points:
        return {}
    every = [point for series in points.values() for point in series]
    first = min(point[START] for point in every)
    last = max(point[START] + point[SECONDS] for point in every)
    most = max(len(series) for series in points.values())
    edges = np.linspace(first, last, min(most, MOST_WINDOWS) + 1)
    middles = (edges[1:] + edges[:-1]) / 2 - first
    found = {role: _share(series, edges, middles) for role, series in points.items()}
    return {role: curve for role, curve in found.items() if len(curve)}


def _share(series: Sequence[Point], edges: np.ndarray, middles: np.ndarray) -> Curve:
    """What was used between two edges, in percent of the time measured between them.

    A point that an edge cuts counts on both sides, each with its own share.
    """
    starts, seconds, used = np.array(sorted(series)).T
    times = np.stack([starts, starts + seconds], axis=1).ravel()
    measured, spent = (
        np.diff(np.interp(edges, times, _sums(amounts))) for amounts in (seconds, used)
    )
    kept = measured > 0.5 * (edges[1] - edges[0])
    return pd.Series(100 * spent[kept] / measured[kept], middles[kept])


def _sums(amounts: np.ndarray) -> np.ndarray:
    """The sum before and after each amount, in turn."""
    ends = np.cumsum(amounts)
    return np.stack([ends - amounts, ends], axis=1).ravel()
