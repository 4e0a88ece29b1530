"""From the events of a run to lines that can be drawn: pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import Any, final

import numpy as np

from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry import compression
from dlrm_hybrid.telemetry.events import Event, Kind

MAX_POINTS = 120  # more are not told apart in a picture


class Axis(Enum):
    """What a loss is drawn over: its meaning in words."""

    STEPS = "training steps"
    SECONDS = "seconds of training"
    BYTES = "bytes sent in training"


@final
@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one line, left to right."""

    x: tuple[float, ...]
    y: tuple[float, ...]


@final
@dataclass(frozen=True, slots=True)
class Band:
    """A line between a lower and an upper one."""

    middle: Curve
    low: tuple[float, ...]
    high: tuple[float, ...]


def training_loss(run: Run, axis: Axis) -> Curve | None:
    """Mean loss of the steps up to each point; None where the axis was not measured."""
    place = _places(run, axis)
    points = [event for event in run.events if event.kind is Kind.PROGRESS]
    if place is None or not points:
        return None
    parts = _parts(points)
    return Curve(
        tuple(place(part[-1]) for part in parts),
        tuple(_mean(part) for part in parts),
    )


def test_loss(run: Run, axis: Axis) -> Curve | None:
    """Log-loss of each evaluation; None where there is none or the axis was not measured."""
    place = _places(run, axis)
    points = [event for event in run.events if event.kind is Kind.EVALUATED]
    if place is None or not points:
        return None
    losses = tuple(event.values["log_loss"] for event in points)
    return Curve(tuple(place(event) for event in points), losses)


def density(run: Run, prefix: str) -> Curve | None:
    """Share of the elements sent up to each point, of all names with this prefix together."""
    pairs: list[tuple[float, float]] = []
    for part in _parts(_compression(run)):
        share = compression.density((event.values["of"] for event in part), prefix)
        if share is not None:
            pairs.append((part[-1].step, share))
    return _curve(pairs)


def threshold(run: Run, prefix: str) -> Band | None:
    """Thresholds of all names with this prefix: the median one, the lowest and the highest."""
    rows: list[tuple[float, float, float, float]] = []
    for part in _parts(_compression(run)):
        found = [
            value["threshold"]
            for name, value in part[-1].values["of"].items()
            if name.startswith(prefix) and value["threshold"]
        ]
        if found:
            rows.append((part[-1].step, median(found), min(found), max(found)))
    middle = _curve([row[:2] for row in rows])
    if middle is None:
        return None
    return Band(middle, tuple(row[2] for row in rows), tuple(row[3] for row in rows))


def _compression(run: Run) -> list[Event]:
    return [event for event in run.events if event.kind is Kind.COMPRESSION]


def _curve(points: Sequence[tuple[float, float]]) -> Curve | None:
    if not points:
        return None
    return Curve(tuple(x for x, _ in points), tuple(y for _, y in points))


def _parts(points: Sequence[Event]) -> list[Sequence[Event]]:
    """Neighbours together, so that at most `MAX_POINTS` are left."""
    size = -(-len(points) // MAX_POINTS)
    return [points[start : start + size] for start in range(0, len(points), size or 1)]


def _mean(points: Sequence[Event]) -> float:
    rows = sum(point.values["rows"] for point in points)
    return sum(point.values["loss"] * point.values["rows"] for point in points) / (rows or 1)


def _places(run: Run, axis: Axis) -> Callable[[Event], float] | None:
    """Where an event stands on the axis."""
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
    for told in _ranks(run):
        interface = told.get("interface")
        if interface is not None and interface["rate_bits_per_second"]:
            rate_bytes = interface["rate_bits_per_second"] / 8
            points.setdefault(told["role"], []).extend(
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
    for told in _ranks(run):
        points.setdefault(told["role"], []).extend(
            (start, seconds, used) for start, seconds, used in told.get("cpu_series") or ()
        )
    return _curves({role: series for role, series in points.items() if series})


def cpu_use_of_all(run: Run) -> Curve | None:
    """Percent of the cores that the ranks can use, all of them together."""
    curves = list(cpu_use(run).values())
    if not curves:
        return None
    cores = min(len(curves), run.environment.get("cores", len(curves)))
    shared = sorted(set(curves[0].x).intersection(*(curve.x for curve in curves)))
    by_place = [dict(zip(curve.x, curve.y, strict=True)) for curve in curves]
    return Curve(
        tuple(shared), tuple(sum(values[x] for values in by_place) / cores for x in shared)
    )


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
    return {role: curve for role, curve in found.items() if curve.x}


def _share(series: Sequence[Point], edges: np.ndarray, middles: np.ndarray) -> Curve:
    """What was used between two edges, in percent of the time measured between them.

    A point that an edge cuts counts on both sides, as much as lies there.
    """
    starts, seconds, used = np.array(sorted(series)).T
    times = np.stack([starts, starts + seconds], axis=1).ravel()
    measured, spent = (
        np.diff(np.interp(edges, times, _sums(amounts))) for amounts in (seconds, used)
    )
    kept = measured > 0.5 * (edges[1] - edges[0])
    percent = 100 * spent[kept] / measured[kept]
    return Curve(tuple(middles[kept].tolist()), tuple(percent.tolist()))


def _sums(amounts: np.ndarray) -> np.ndarray:
    """The sum before and after each amount, in turn."""
    ends = np.cumsum(amounts)
    return np.stack([ends - amounts, ends], axis=1).ravel()
