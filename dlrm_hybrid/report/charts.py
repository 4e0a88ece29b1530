"""Lines, bands, points and stacked bars. Every text in them is drawn as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dlrm_hybrid.report.axes import (
    KEY_LINE_INCHES,
    AxesText,
    Style,
    add_key,
    drawing,
    logarithmic,
    panels,
    part_color,
    tick,
)
from dlrm_hybrid.report.curves import Band, Curve
from dlrm_hybrid.report.measures import nonzero

WIDTH_INCHES, HEIGHT_INCHES = 5.2, 3.3
OUTLIER = 3.0  # times the median of all points; higher points of a diverging run are cut off
WIDE_RANGE = 5.0  # the largest over the smallest value: more than that is drawn in powers of ten
KEY_COLUMNS = 2
SHORT_NAME = 12  # letters; names up to this length get one more column
MAX_LABELS = 12  # points; of more the names would cover each other
LABEL_POINTS, POINTS_PER_INCH = 11.0, 72.0
CLOSER = 4  # bars shorter than the longest by that factor are drawn once more, larger


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One run in a picture.

    Attributes:
        label: of the run, for a key.
        style: of the run.
        curve: the line.
        dots: single points beside it.
        band: shaded around the line.
    """

    label: str
    style: Style
    curve: Curve | None
    dots: Curve | None
    band: Band | None


def losses(drawn: Sequence[Line], text: AxesText, *, above_zero: bool) -> Figure:
    """Lines of several runs; points far above all others are left out of sight.

    Args:
        drawn: the runs.
        text: of the axes.
        above_zero: no x is 0, so the axis is logarithmic where one run ends far before another.
    """
    with drawing():
        figure, axes = _lines(HEIGHT_INCHES, drawn, text)
        curves = [curve for line in drawn for curve in (line.curve, line.dots) if curve is not None]
        ends = [float(curve.index[-1]) for curve in curves]
        if above_zero and max(ends) > WIDE_RANGE * min(ends) > 0:
            axes.set_xscale("log")
            logarithmic(axes.xaxis, text.x_unit)
        values = [float(value) for curve in curves for value in curve]
        limit = OUTLIER * median(values)
        if max(values) > limit > 0:
            axes.set_ylim(top=1.05 * max(value for value in values if value <= limit))
        return figure


def magnitudes(drawn: Sequence[Line], text: AxesText) -> Figure:
    """Lines of positive values: from zero where they are alike, else in powers of ten."""
    with drawing():
        figure, axes = _lines(HEIGHT_INCHES, drawn, text)
        values = [value for line in drawn for value in _values(line)]
        if max(values) > WIDE_RANGE * min(values) > 0:
            axes.set_yscale("log")
            logarithmic(axes.yaxis)
        else:
            axes.set_ylim(bottom=0.0, top=1.1 * max(values))
        return figure


def shares(drawn: Sequence[Line], text: AxesText, *, with_key: bool) -> Figure:
    """Lines of percentages, with all of 0 to 100 in sight; a key to them needs room of its own."""
    with drawing():
        key_lines = -(-len(drawn) // KEY_COLUMNS) if with_key else 0
        figure, axes = _lines(HEIGHT_INCHES + KEY_LINE_INCHES * key_lines, drawn, text)
        axes.set_ylim(0.0, max([100.0, *(value for line in drawn for value in _values(line))]))
        if with_key:
            add_key(figure, KEY_COLUMNS)
        return figure


def points(
    positions: Sequence[tuple[float, float]],
    labels: Sequence[str],
    styles: Sequence[Style],
    text: AxesText,
) -> Figure:
    """A point for each run with its label beside it, x in powers of ten."""
    with drawing():
        figure, axes = _one(HEIGHT_INCHES, text)
        for (x, y), label, style in zip(positions, labels, styles, strict=True):
            axes.plot([x], [y], style.marker, color=style.color, markersize=9, label=label)
        axes.set_xscale("log")
        axes.margins(x=0.15, y=0.15)
        logarithmic(axes.xaxis, text.x_unit)
        # Steps of 2.5 have a digit more: ticks that change with the layout would cut off the title.
        axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=[1, 2, 5, 10]))
        if len(positions) <= MAX_LABELS:
            _label(figure, axes, positions, labels)
        return figure


def _label(
    figure: Figure,
    axes: Axes,
    positions: Sequence[tuple[float, float]],
    labels: Sequence[str],
) -> None:
    """Names beside points: towards the middle, each below the one above it on the same side."""
    figure.draw_without_rendering()  # only now it is known where the points are
    at = [
        axes.transData.transform(position) * POINTS_PER_INCH / figure.dpi for position in positions
    ]
    middle = axes.bbox.x0 + axes.bbox.width / 2
    middle *= POINTS_PER_INCH / figure.dpi
    lowest = {True: float("inf"), False: float("inf")}
    for number in sorted(range(len(at)), key=lambda number: -at[number][1]):
        is_left = bool(at[number][0] < middle)
        y = min(float(at[number][1]), lowest[is_left] - LABEL_POINTS)
        lowest[is_left] = y
        axes.annotate(
            labels[number],
            positions[number],
            (8 if is_left else -8, y - at[number][1]),
            textcoords="offset points",
            ha="left" if is_left else "right",
            va="center",
            fontsize=9,
        )


def stacked(parts: pd.DataFrame, x_text: str) -> Figure:
    """A horizontal bar for each row, its parts stacked, with its sum at the end.

    Args:
        parts: a column for each part; one that is 0 everywhere is left out.
        x_text: what the lengths are, with the unit.
    """
    with drawing():
        parts = nonzero(parts).fillna(0.0)
        columns = KEY_COLUMNS + (max(map(len, parts)) <= SHORT_NAME)
        height = 1.0 + 0.5 * len(parts) + KEY_LINE_INCHES * -(-len(parts.columns) // columns)
        figure, axes = _one(height, AxesText(x_text, ""))
        _bars(axes, parts)
        add_key(figure, columns)
        return figure


def stacked_twice(parts: pd.DataFrame, x_text: str) -> Figure:
    """The bars of `stacked` in a wide figure, and the short ones again, larger."""
    parts = nonzero(parts).fillna(0.0)
    sums = parts.sum(axis="columns")
    short = parts.filter([bar for bar, s in sums.items() if CLOSER * s < sums.max()], axis="index")
    if short.empty:
        return stacked(parts, x_text)
    with drawing():
        texts = [AxesText(x_text, ""), AxesText(f"{x_text}, a closer look", "")]
        heights = len(parts), len(short)
        figure, (upper, lower) = panels((8.0, 1.8 + 0.5 * sum(heights)), texts, heights)
        _bars(upper, parts)
        _bars(lower, short)
        add_key(figure, 2 * KEY_COLUMNS)
        return figure


def draw(axes: Axes, line: Line) -> None:
    """Band, line and dots of one run."""
    color = line.style.color
    dashes = (0, line.style.dashes) if line.style.dashes else "solid"
    label = line.label
    if line.band is not None:
        low, high = line.band["low"], line.band["high"]
        axes.fill_between(low.index, low, high, color=color, alpha=0.12, linewidth=0)
    if line.curve is not None:
        marker = line.style.marker if len(line.curve) == 1 else ""
        axes.plot(line.curve, color=color, linestyle=dashes, marker=marker, label=label)
        label = ""
    if line.dots is not None:
        axes.plot(line.dots, "D", color=color, markersize=5, markeredgecolor="white", label=label)


def _lines(height_inches: float, drawn: Sequence[Line], text: AxesText) -> tuple[Figure, Axes]:
    figure, axes = _one(height_inches, text)
    for line in drawn:
        draw(axes, line)
    return figure, axes


def _one(height_inches: float, text: AxesText) -> tuple[Figure, Axes]:
    figure, (axes,) = panels((WIDTH_INCHES, height_inches), [text], [1.0])
    return figure, axes


def _bars(axes: Axes, parts: pd.DataFrame) -> None:
    ends = pd.Series(0.0, index=parts.index)
    for number, (name, lengths) in enumerate(parts.items()):
        color, rows = part_color(number, str(name)), range(len(parts))
        axes.barh(rows, lengths, left=ends, color=color, label=str(name), height=0.42)
        ends = ends + lengths
    for row, (label, end) in enumerate(ends.items()):
        axes.text(0.0, row - 0.26, f" {label}", va="bottom", fontsize=10)
        axes.text(end, row, f" {tick(end)}", va="center", fontsize=10)
    axes.set_yticks([])
    axes.set_ylim(len(parts) - 0.6, -0.75)
    axes.margins(x=0.14)


def _values(line: Line) -> list[float]:
    shapes = (line.curve,) if line.band is None else (line.band["low"], line.band["high"])
    return [float(value) for shape in shapes if shape is not None for value in shape]
