"""From the events of a run to lines that can be drawn: pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import median
from typing import final

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
