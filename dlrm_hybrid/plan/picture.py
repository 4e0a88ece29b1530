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
        links = " ".join(text for text in (one.rate, one.latency) if text) or "no bound"
        tables = f" + {one.table_servers}" if one.table_servers else ""
        name = f"{links}, T × {one.stages} + {one.servers}{tables}"
        lines.setdefault(name, {})[one.trainers] = one.samples_per_second
    curves = {name: pd.Series(dict(sorted(points.items()))) for name, points in lines.items()}
    drawn = [
        Line(label=name, style=style(number), curve=curve, dots=None, band=None)
        for number, (name, curve) in enumerate(curves.items())
    ]
    figure = charts.magnitudes(drawn, AxesText("trainers T", "samples per second"))
    trainers = sorted({one.trainers for one in predictions})
    (axes,) = figure.axes
    axes.set_xscale("log", base=2)
    axes.set_xticks(trainers, [str(one) for one in trainers])
    axes.set_xticks([], minor=True)
    with keyed(figure, KEY_COLUMNS):
        save(figure, path)
