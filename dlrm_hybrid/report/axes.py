"""The look of all pictures: colours, a figure, its axes, its numbers, its key; as SVG or a file."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from dlrm_hybrid.disk import replacing
from dlrm_hybrid.telemetry.spans import Span

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8172b8", "#808080")
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
MARKERS = ("o", "s", "^", "X")
# Of bars, which are never runs. The classes of traffic come in pairs: there and back.
PARTS = ("#3b6ea5", "#9cc3e6", "#d9772b", "#f7bf86", "#4f9d4f", "#a9a9a9", "#8a6bb1", "#c9b3dd")
PALE = "#80808038"
TEXT = "#757575"
"""Of equal contrast to a white page and to a dark one: files are drawn on either, on nothing."""
FORMATS = (".png", ".svg", ".pdf")


@final
@dataclass(frozen=True, slots=True)
class Style:
    """How the run of one number is drawn.

    Attributes:
        color: as CSS has it.
        dashes: lengths on and off, in points; none is a solid line.
        marker: of single points, as matplotlib names it.
    """

    color: str
    dashes: tuple[float, ...]
    marker: str


def style(number: int) -> Style:
    """Thirty-two differ."""
    group = number // len(COLORS) % len(DASHES)
    return Style(COLORS[number % len(COLORS)], DASHES[group], MARKERS[group])


def part_color(number: int, name: str) -> str:
    """Of the part of a bar; to wait is no work, so it is pale."""
    return PALE if name == Span.WAIT else PARTS[number % len(PARTS)]


DOTS_PER_INCH = 150
KEY_LINE_INCHES = 0.24
KEY_MARK_INCHES, KEY_LETTER_INCHES = 0.6, 0.085
PREFIXES = {"T": 1e12, "G": 1e9, "M": 1e6, "k": 1e3}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
CROWDED = 400  # the largest value over the smallest: more would set ticks on ticks
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
class AxesText:
    """What the axes of a panel mean, with units.

    Attributes:
        x: below it.
        y: beside it.
        x_unit: of the ticks on the x-axis, e.g. B for 12.3 MB; none for 12.3M.
        x_is_whole: ticks are whole numbers, since nothing is between two of them.
    """

    x: str
    y: str
    x_unit: str = ""
    x_is_whole: bool = False


@contextmanager
def drawing() -> Generator[None, None, None]:
    """The look of what is drawn inside."""
    with mpl.rc_context(SETTINGS):
        yield


def panels(
    size_inches: tuple[float, float], texts: Sequence[AxesText], heights: Sequence[float]
) -> tuple[Figure, list[Axes]]:
    """A figure with a panel for each text, row by row; counts on the x-axes read as 12.3k.

    Args:
        size_inches: width and height.
        texts: as many in each row.
        heights: of each row, relative to each other.
    """
    figure = Figure(figsize=size_inches, layout="constrained")
    grid = figure.add_gridspec(len(heights), len(texts) // len(heights), height_ratios=heights)
    every = [figure.add_subplot(cell) for cell in grid]  # pyright: ignore[reportUnknownVariableType]
    for axes, text in zip(every, texts, strict=True):
        axes.set_xlabel(text.x)
        axes.set_ylabel(text.y)
        axes.xaxis.set_major_formatter(ticks(text.x_unit))
        if text.x_unit:  # numbers with a unit are longer
            axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
        elif text.x_is_whole:
            axes.xaxis.set_major_locator(
                MaxNLocator(steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
            )
        axes.ticklabel_format(axis="y", style="plain", useOffset=False)
    return figure, every


def logarithmic(axis: Axis, unit: str = "") -> None:
    """Ticks of a logarithmic scale, at 1, 2, 5, 10 as far as there is room."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < CROWDED * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(ticks(unit))
    axis.set_minor_formatter(NullFormatter())


def ticks(unit: str) -> Callable[[float, float], str]:
    """Writes the numbers of an axis: 12,300 as 12.3k, or with a unit as 12.3 kB."""

    def written(value: float, _: float = 0.0) -> str:
        number, prefix = tick(value), ""
        if number[-1] in PREFIXES:
            number, prefix = number[:-1], number[-1]
        return f"{number} {prefix}{unit}"

    return written if unit else tick


def tick(value: float, _: float = 0.0) -> str:
    """12,300 as 12.3k, 0.000012 as 1.2·10⁻⁵."""
    for prefix, size in PREFIXES.items():
        if abs(value) >= size:
            return f"{value / size:.3g}{prefix}"
    written = f"{value:.3g}"
    if "e" not in written:
        return written
    number, power = written.split("e")
    return f"{number}·10{str(int(power)).translate(RAISED)}"


def add_key(figure: Figure, columns: int) -> Legend:
    """What the drawn things are called, above them."""
    names = _names(figure)
    columns = _columns(figure, columns)
    return figure.legend(list(names.values()), list(names), loc="outside upper left", ncols=columns)


@contextmanager
def keyed(figure: Figure, columns: int) -> Generator[None, None, None]:
    """The figure with a key above it, for as long, and the room for it."""
    width, height = figure.get_size_inches()
    with drawing():
        key = add_key(figure, columns)
    lines = -(-len(_names(figure)) // _columns(figure, columns))
    figure.set_size_inches(width, height + KEY_LINE_INCHES * lines)
    yield
    key.remove()
    figure.set_size_inches(width, height)


def svg(figure: Figure) -> bytes:
    """The figure for a page."""
    file = BytesIO()
    with drawing():
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()


def save(figure: Figure, path: Path) -> None:
    """Write a file of one of `FORMATS`, as its name ends, for any page; raises OSError."""
    with drawing(), replacing(path) as partial:
        figure.savefig(partial, dpi=DOTS_PER_INCH, format=path.suffix[1:])


def _columns(figure: Figure, most: int) -> int:
    """Of a key, as many as there is room for."""
    names = _names(figure)
    needed = KEY_MARK_INCHES + KEY_LETTER_INCHES * max(map(len, names))
    return max(1, min(most, len(names), int(figure.get_figwidth() / needed)))


def _names(figure: Figure) -> dict[str, Any]:
    """What is drawn by its name, each once."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for shape, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, shape)
    return named
