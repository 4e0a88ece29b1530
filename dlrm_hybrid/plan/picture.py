"""Samples per second over trainers, a line for each kind of links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dlrm_hybrid.plan.prediction import Prediction
from dlrm_hybrid.report import charts
from dlrm_hybrid.report.axes import AxesText, keyed, save, style
from dlrm_hybrid.report.charts import Line

KEY_COLUMNS = 2


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Write the picture of some predictions.

    Args:
        predictions: in any order.
        path: of a PNG, SVG or PDF.

    Raises:
        OSError: it cannot be written.
    """
    lines: dict[str, dict[int, float]] = {}
    for one in predictions:
        _, _, shape = one.planned.name.partition(" ")
        name = f"{one.planned.links or 'no bound'}, T {shape}"
        trainers = one.planned.config.parallel.trainers
        lines.setdefault(name, {})[trainers] = one.samples_per_second
    curves = {name: pd.Series(dict(sorted(points.items()))) for name, points in lines.items()}
    drawn = [
        Line(label=name, style=style(number), curve=curve, dots=None, band=None)
        for number, (name, curve) in enumerate(curves.items())
    ]
    figure = charts.magnitudes(drawn, AxesText("trainers T", "samples per second"))
    numbers = sorted({trainers for points in lines.values() for trainers in points})
    (axes,) = figure.axes
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(one) for one in numbers])
    axes.set_xticks([], minor=True)
    with keyed(figure, KEY_COLUMNS):
        save(figure, path)
