"""Pictures as SVG: lines, bands, points and stacked bars. Every text in them is drawn as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from statistics import median
from typing import Any, final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from dlrm_hybrid.report.curves import Band, Curve
from dlrm_hybrid.report.palette import Style, part_color

WIDTH_INCHES, HEIGHT_INCHES = 5.2, 3.3
OUTLIER = 3.0  # times the median of all points; a run that diverges leaves the picture
WIDE_RANGE = 5.0  # the largest over the smallest value: more than that is drawn in powers of ten
SETTINGS: dict[Any, Any] = {
    "font.size": 11,
    "text.parse_math": False,  # a dollar in a name is a dollar
    "svg.fonttype": "path",  # looks the same wherever it is opened
    "svg.hashsalt": "dlrm_hybrid",  # the same picture is the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.alpha": 0.25,
    "axes.edgecolor": "#666666",
    "text.color": "#1a1a1a",
    "axes.labelcolor": "#1a1a1a",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One run in a picture.

    Attributes:
        style: of the run.
        curve: the line.
        dots: single points beside it.
        band: shaded around the line.
    """

    style: Style
    curve: Curve | None
    dots: Curve | None
    band: Band | None


@final
@dataclass(frozen=True, slots=True)
class AxesText:
    """What the axes of a picture mean, with units."""

    x: str
    y: str


def losses(drawn: Sequence[Line], text: AxesText) -> bytes:
    """Lines of several runs; points far above all others are left out of sight."""
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure(HEIGHT_INCHES, text)
        for line in drawn:
            _draw(axes, line)
        axes.xaxis.set_major_formatter(_tick)
        curves = [curve for line in drawn for curve in (line.curve, line.dots) if curve is not None]
        values = [value for curve in curves for value in curve.y]
        limit = OUTLIER * median(values)
        if max(values) > limit > 0:
            axes.set_ylim(top=1.05 * max(value for value in values if value <= limit))
        return _svg(figure)


def magnitudes(drawn: Sequence[Line], text: AxesText) -> bytes:
    """Lines of positive values: from zero where they are alike, else in powers of ten."""
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure(HEIGHT_INCHES, text)
        for line in drawn:
            _draw(axes, line)
        axes.xaxis.set_major_formatter(_tick)
        values = [value for line in drawn for value in _values(line)]
        if max(values) > WIDE_RANGE * min(values) > 0:
            axes.set_yscale("log")
            _log_ticks(axes.yaxis)
        else:
            axes.set_ylim(bottom=0.0, top=1.1 * max(values))
        return _svg(figure)


def points(places: Sequence[tuple[float, float]], styles: Sequence[Style], text: AxesText) -> bytes:
    """A point for each run, x in powers of ten."""
    with mpl.rc_context(SETTINGS):
        figure, axes = _figure(HEIGHT_INCHES, text)
        for (x, y), style in zip(places, styles, strict=True):
            axes.plot([x], [y], style.marker, color=style.color, markersize=9)
        axes.set_xscale("log")
        _log_ticks(axes.xaxis)
        axes.margins(x=0.15, y=0.15)
        return _svg(figure)


def stacked(labels: Sequence[str], parts: Mapping[str, Sequence[float]], x_text: str) -> bytes:
    """A horizontal bar below each label, from one part to the next; its sum stands at its end.

    Args:
        labels: top to bottom.
        parts: by name the length in each bar.
        x_text: what the lengths are, with the unit.
    """
    with mpl.rc_context(SETTINGS):
        legend_lines = -(-len(parts) // 2)
        height = 1.0 + 0.5 * len(labels) + 0.24 * legend_lines
        figure, axes = _figure(height, AxesText(x_text, ""))
        ends = [0.0] * len(labels)
        for number, (name, lengths) in enumerate(parts.items()):
            color, rows = part_color(number), range(len(labels))
            axes.barh(rows, lengths, left=ends, color=color, label=name, height=0.42)
            ends = [start + length for start, length in zip(ends, lengths, strict=True)]
        for place, (label, end) in enumerate(zip(labels, ends, strict=True)):
            axes.text(0.0, place - 0.26, f" {label}", va="bottom", fontsize=10)
            axes.text(end, place, f" {_tick(end)}", va="center", fontsize=10)
        axes.set_yticks([])
        axes.set_ylim(len(labels) - 0.6, -0.75)
        axes.margins(x=0.14)
        axes.xaxis.set_major_formatter(_tick)
        figure.legend(loc="outside upper left", ncols=2, frameon=False, fontsize=10)
        return _svg(figure)


def _figure(height_inches: float, text: AxesText) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_INCHES, height_inches), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlabel(text.x)
    axes.set_ylabel(text.y)
    return figure, axes


def _draw(axes: Axes, line: Line) -> None:
    color = line.style.color
    dashes = (0, line.style.dashes) if line.style.dashes else "solid"
    if line.band is not None:
        x = line.band.middle.x
        axes.fill_between(x, line.band.low, line.band.high, color=color, alpha=0.12, linewidth=0)
    if line.curve is not None:
        marker = line.style.marker if len(line.curve.x) == 1 else ""
        axes.plot(line.curve.x, line.curve.y, color=color, linestyle=dashes, marker=marker)
    if line.dots is not None:
        axes.plot(line.dots.x, line.dots.y, "D", color=color, markersize=5, markeredgecolor="white")


def _values(line: Line) -> tuple[float, ...]:
    if line.band is not None:
        return (*line.band.low, *line.band.high)
    return () if line.curve is None else line.curve.y


def _log_ticks(axis: Axis) -> None:
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=8))
    axis.set_major_formatter(_tick)
    axis.set_minor_formatter(NullFormatter())


def _tick(value: float, _: float = 0.0) -> str:
    """12,300 as 12.3k."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _svg(figure: Figure) -> bytes:
    file = BytesIO()
    figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
