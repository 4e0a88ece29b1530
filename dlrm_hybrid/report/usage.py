"""How busy links and processors were while training, over time: pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_hybrid.report.curves import Curve
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.telemetry.events import Kind

MAX_POINTS = 60  # steps of single batches are noise; what a person looks for is longer
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
    busy = {role: _mean(series) for role, series in points.items() if series}
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


def _mean(series: Sequence[Point]) -> float:
    return sum(used for *_, used in series) / (sum(seconds for _, seconds, _ in series) or 1.0)


def _curves(points: Mapping[str, Sequence[Point]]) -> dict[str, Curve]:
    """All over the same times, in seconds since the first point; none where none trained."""
    if not points:
        return {}
    every = [point for series in points.values() for point in series]
    first = min(point[START] for point in every)
    last = max(point[START] + point[SECONDS] for point in every)
    most = max(len(series) for series in points.values())
    edges = np.linspace(first, last, min(most, MAX_POINTS) + 1)
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
