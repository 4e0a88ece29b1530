"""Draws predicted samples per second over trainers, a line for each kind of links."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from dlrm_hybrid.plan.prediction import Prediction
from dlrm_hybrid.report.drawing import figure, save
from dlrm_hybrid.report.figures import AxesText, Line, Lines, Picture, Range


def draw(predictions: Sequence[Prediction], path: Path) -> None:
    """Draw predictions, in any order, into a PNG, SVG or PDF file; raises OSError."""
    points: dict[str, dict[int, float]] = {}
    for prediction in predictions:
        _, _, shape = prediction.planned.name.partition(" ")
        name = f"{prediction.planned.links or 'no bound'}, T {shape}"
        trainers = prediction.planned.config.parallel.trainers
        points.setdefault(name, {})[trainers] = prediction.samples_per_second
    lines = [
        Line(label=name, number=number, curve=pd.Series(dict(sorted(speeds.items()))))
        for number, (name, speeds) in enumerate(points.items())
    ]
    text = AxesText("trainers T", "samples per second")
    content = Lines(lines, text, Range.MAGNITUDES, x_doubles=True, has_key=True)
    save(figure(Picture("", content, "", has_runs=False)), path)
