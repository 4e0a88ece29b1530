"""Draws pictures with matplotlib, for pages and as files; all style is decided here."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any, final

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from dlrm_hybrid.disk import replacing
from dlrm_hybrid.report.figures import (
    MAX_LABELS,
    AxesText,
    Bars,
    Line,
    Lines,
    Picture,
    Points,
    Range,
)
from dlrm_hybrid.report.measures import nonzero
from dlrm_hybrid.telemetry.spans import Span

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8172b8", "#808080")
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
MARKERS = {  # names in matplotlib, and the shapes in a page's key
    "o": '<circle cx="16" cy="5" r="4"/>',
    "s": '<rect x="12" y="1" width="8" height="8"/>',
    "^": '<path d="M16 0l5 9h-10z"/>',
    "X": '<path d="M12 0h3l1 2 1-2h3v10h-3l-1-2-1 2h-3z"/>',
}
# For parts of bars, which are never runs. Classes of traffic come in pairs: there and back.
PARTS = ("#3b6ea5", "#9cc3e6", "#d9772b", "#f7bf86", "#4f9d4f", "#a9a9a9", "#8a6bb1", "#c9b3dd")
PALE = "#80808038"  # for waiting, which is no work
TEXT = "#757575"
"""A grey of equal contrast to white and to dark pages, as pictures have no background."""
FORMATS = (".png", ".svg", ".pdf")
DOTS_PER_INCH = 150
WIDTH_INCHES, HEIGHT_INCHES = 5.2, 3.3
KEY_COLUMNS = 2
KEY_LINE_INCHES = 0.24
KEY_MARK_INCHES, KEY_LETTER_INCHES = 0.6, 0.085
SHORT_NAME = 12  # letters; names up to this length get one more column
LABEL_POINTS, POINTS_PER_INCH = 11.0, 72.0
OUTLIER = 3.0  # points above this many times the median, of a diverging run, are cut off
WIDE_RANGE = 5.0  # with a larger ratio of largest to smallest value, an axis is logarithmic
NARROW_RANGE, CROWDED_RANGE = 3.0, 400.0  # of a logarithmic axis: linear ticks, powers of ten only
ROUND = (1, 2, 5, 10)  # steps between ticks
PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
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
    "axes.edgecolor": TEXT,
    "text.color": TEXT,
    "axes.labelcolor": TEXT,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
    "savefig.transparent": True,
    "legend.frameon": False,
    "legend.fontsize": 10,
}


@final
@dataclass(frozen=True, slots=True)
class Style:
    """Style of a line.

    Attributes:
        dashes: lengths on and off, in points; empty for a solid line.
        marker: matplotlib's name of the marker of single points.
    """

    color: str
    dashes: tuple[float, ...]
    marker: str

    @property
    def line(self) -> Any:
        """The dashes in matplotlib's notation."""
        return (0, self.dashes) if self.dashes else "solid"


def style(number: int) -> Style:
    """The style of a line's number; 32 are different."""
    group = number // len(COLORS) % len(DASHES)
    return Style(COLORS[number % len(COLORS)], DASHES[group], tuple(MARKERS)[group])


@contextmanager
def drawing() -> Generator[None, None, None]:
    """Apply the style to everything drawn inside the `with`."""
    with mpl.rc_context(SETTINGS):
        yield


def figure(picture: Picture, *, is_alone: bool = False) -> Figure:
    """Draw a picture of a report with matplotlib.

    Args:
        is_alone: whether to draw the key of runs into it, as no page shows that beside it.
    """
    content = picture.content
    with drawing():
        if isinstance(content, Bars):
            return _bars(content)
        if isinstance(content, Points):
            drawn, labels = _points(content), content.labels
        else:
            drawn, labels = _lines(content), [line.label for line in content.lines]
        if (picture.has_runs and is_alone) or (isinstance(content, Lines) and content.has_key):
            lines = -(-len(labels) // key_columns(drawn, labels))
            drawn.set_figheight(drawn.get_figheight() + KEY_LINE_INCHES * lines)
            add_key(drawn)
        return drawn


def svg(drawn: Figure) -> bytes:
    """Render a figure as SVG for a page."""
    file = BytesIO()
    with drawing():
        drawn.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def save(drawn: Figure, path: Path) -> None:
    """Write a figure to a file in the one of `FORMATS` that its suffix names; raises OSError."""
    with drawing(), replacing(path) as partial:
        drawn.savefig(partial, dpi=DOTS_PER_INCH, format=path.suffix[1:])


def panels(
    size_inches: tuple[float, float], texts: Sequence[AxesText], heights: Sequence[float]
) -> tuple[Figure, list[Axes]]:
    """Make a figure with a panel for each text, row by row.

    Args:
        texts: texts of the panels' axes; all rows have the same number.
        heights: relative height of each row.
    """
    drawn = Figure(figsize=size_inches, layout="constrained")
    grid = drawn.add_gridspec(len(heights), len(texts) // len(heights), height_ratios=heights)
    plots = [drawn.add_subplot(cell) for cell in grid]  # pyright: ignore[reportUnknownVariableType]
    for axes, text in zip(plots, texts, strict=True):
        axes.set_xlabel(text.x)
        axes.set_ylabel(text.y)
        axes.xaxis.set_major_formatter(ticks(text.x_unit))
        if text.x_unit:  # numbers with a unit are longer
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=ROUND))
        elif text.x_is_whole:
            axes.xaxis.set_major_locator(MaxNLocator(steps=ROUND, integer=True, min_n_ticks=1))
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    return drawn, plots


def logarithmic(axis: Axis, unit: str = "") -> None:
    """Set the ticks of a logarithmic axis, at 1, 2, 5, 10 as far as there is room."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < CROWDED_RANGE * low else (1.0,)
    is_narrow = high < NARROW_RANGE * low
    locator = MaxNLocator(nbins=5, steps=ROUND) if is_narrow else LogLocator(subs=subs, numticks=8)
    axis.set_major_locator(locator)
    axis.set_major_formatter(ticks(unit))
    axis.set_minor_formatter(NullFormatter())


def ticks(unit: str) -> Callable[[float, float], str]:
    """Make a formatter of ticks: 12,300 becomes 12.3k, or with a unit 12.3 kB."""

    def written(value: float, _: float = 0.0) -> str:
        number, prefix = tick(value), ""
        if number[-1] in PREFIXES:
            number, prefix = number[:-1], number[-1]
        return f"{number} {prefix}{unit}"

    return written if unit else tick


def tick(value: float, _: float = 0.0) -> str:
    """Format a number in three digits: 12,300 as 12.3k, 0.000012 as 1.2·10⁻⁵."""
    for prefix, size in PREFIXES.items():
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    written = f"{value:.3g}"
    if "e" not in written:
        return written
    number, power = written.split("e")
    return f"{number}·10{str(int(power)).translate(RAISED)}"


def add_key(drawn: Figure, columns: int = KEY_COLUMNS) -> None:
    """Add a key with each label once, above the panels."""
    shapes: dict[str, Any] = {}
    for axes in drawn.axes:
        for shape, name in zip(*axes.get_legend_handles_labels(), strict=True):
            shapes.setdefault(name, shape)
    shown = key_columns(drawn, list(shapes), columns)
    drawn.legend(list(shapes.values()), list(shapes), loc="outside upper left", ncols=shown)


def key_columns(drawn: Figure, names: Sequence[str], most: int = KEY_COLUMNS) -> int:
    """Number of columns that a key has room for."""
    needed = KEY_MARK_INCHES + KEY_LETTER_INCHES * max(map(len, names))
    return max(1, min(most, len(names), int(drawn.get_figwidth() / needed)))


def draw_line(axes: Axes, line: Line) -> None:
    """Draw the band, curve and dots of a line."""
    look, label = style(line.number), line.label
    if line.band is not None:
        low, high = line.band["low"], line.band["high"]
        axes.fill_between(low.index, low, high, color=look.color, alpha=0.12, linewidth=0)
    if line.curve is not None:
        marker = look.marker if len(line.curve) == 1 else ""
        axes.plot(line.curve, color=look.color, linestyle=look.line, marker=marker, label=label)
        label = ""
    if line.dots is not None:
        settings: Mapping[str, Any] = {"markersize": 5, "markeredgecolor": "white", "label": label}
        axes.plot(line.dots, "D", color=look.color, **settings)


def draw_bars(axes: Axes, parts: pd.DataFrame) -> None:
    """Draw a horizontal bar for each row, its name above it and its sum at the end."""
    ends = pd.Series(0.0, index=parts.index)
    for number, (name, lengths) in enumerate(parts.items()):
        color = PALE if name == Span.WAIT else PARTS[number % len(PARTS)]
        axes.barh(range(len(parts)), lengths, left=ends, color=color, label=str(name), height=0.42)
        ends = ends + lengths
    for row, (label, end) in enumerate(ends.items()):
        axes.text(0.0, row - 0.26, f" {label}", va="bottom", fontsize=10)
        axes.text(end, row, f" {tick(end)}", va="center", fontsize=10)
    axes.set_yticks([])
    axes.set_ylim(len(parts) - 0.6, -0.75)
    axes.margins(x=0.14)


def _one(height_inches: float, text: AxesText) -> tuple[Figure, Axes]:
    drawn, (axes,) = panels((WIDTH_INCHES, height_inches), [text], [1.0])
    return drawn, axes


def _lines(content: Lines) -> Figure:
    drawn, axes = _one(HEIGHT_INCHES, content.text)
    for line in content.lines:
        draw_line(axes, line)
    shapes = [shape for line in content.lines for shape in _shapes(line)]
    values = [float(value) for shape in shapes for value in shape]
    if content.x_doubles:
        places = sorted({int(x) for shape in shapes for x in shape.index})
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, list(map(str, places)))
        axes.set_xticks([], minor=True)
    ends = [float(shape.index[-1]) for shape in shapes]
    if content.x_positive and max(ends) > WIDE_RANGE * min(ends) > 0:
        axes.set_xscale("log")
        logarithmic(axes.xaxis, content.text.x_unit)
    match content.shows:
        case Range.LOSSES:
            limit = OUTLIER * median(values)
            if max(values) > limit > 0:
                axes.set_ylim(top=1.05 * max(value for value in values if value <= limit))
        case Range.SHARES:
            axes.set_ylim(0.0, max([100.0, *values]))
        case Range.MAGNITUDES if max(values) > WIDE_RANGE * min(values) > 0:
            axes.set_yscale("log")
            logarithmic(axes.yaxis)
        case Range.MAGNITUDES:
            axes.set_ylim(bottom=0.0, top=1.1 * max(values))
    return drawn


def _shapes(line: Line) -> list[pd.Series]:
    band = [] if line.band is None else [line.band["low"], line.band["high"]]
    return [shape for shape in (*band, line.curve, line.dots) if shape is not None]


def _points(content: Points) -> Figure:
    drawn, axes = _one(HEIGHT_INCHES, content.text)
    for (x, y), label, number in zip(content.places, content.labels, content.numbers, strict=True):
        look = style(number)
        axes.plot([x], [y], look.marker, color=look.color, markersize=9, label=label)
    axes.set_xscale("log")
    axes.margins(x=0.15, y=0.15)
    logarithmic(axes.xaxis, content.text.x_unit)
    # No steps of 2.5: ticks with a digit more, chosen after the layout, would cut off the title.
    axes.yaxis.set_major_locator(MaxNLocator(nbins=7, steps=ROUND))
    if len(content.places) <= MAX_LABELS:
        _label(drawn, axes, content)
    return drawn


def _label(drawn: Figure, axes: Axes, content: Points) -> None:
    """Write names beside points, on the inner side, each below the one above it on that side."""
    drawn.draw_without_rendering()  # decides where the points are
    scale = POINTS_PER_INCH / drawn.dpi
    places = [axes.transData.transform(place) * scale for place in content.places]
    middle = (axes.bbox.x0 + axes.bbox.width / 2) * scale
    lowest = {True: float("inf"), False: float("inf")}
    for number in sorted(range(len(places)), key=lambda number: -places[number][1]):
        x, y = map(float, places[number])
        is_left = x < middle
        lowest[is_left] = shown = min(y, lowest[is_left] - LABEL_POINTS)
        axes.annotate(
            content.labels[number],
            content.places[number],
            (8 if is_left else -8, shown - y),
            textcoords="offset points",
            ha="left" if is_left else "right",
            va="center",
            fontsize=9,
        )


def _bars(content: Bars) -> Figure:
    parts = nonzero(content.parts).fillna(0.0)
    columns = KEY_COLUMNS + (max(map(len, parts)) <= SHORT_NAME)
    height = 1.0 + 0.5 * len(parts) + KEY_LINE_INCHES * -(-len(parts.columns) // columns)
    drawn, axes = _one(height, AxesText(content.x_text, ""))
    draw_bars(axes, parts)
    add_key(drawn, columns)
    return drawn
