"""The look of all pictures: a figure, its axes, its numbers, its key; as SVG or in a file."""

from __future__ import annotations

from collections.abc import Generator, Sequence
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
from matplotlib.ticker import LogLocator, NullFormatter

DOTS_PER_INCH = 150
KEY_LINE_INCHES = 0.24
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
    "axes.edgecolor": "#666666",
    "text.color": "#1a1a1a",
    "axes.labelcolor": "#1a1a1a",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "legend.frameon": False,
    "legend.fontsize": 10,
}


@final
@dataclass(frozen=True, slots=True)
class AxesText:
    """What the axes of a panel mean, with units."""

    x: str
    y: str


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
    placed = [figure.add_subplot(cell) for cell in grid]  # pyright: ignore[reportUnknownVariableType]
    for axes, text in zip(placed, texts, strict=True):
        axes.set_xlabel(text.x)
        axes.set_ylabel(text.y)
        axes.xaxis.set_major_formatter(tick)
    return figure, placed


def logarithmic(axis: Axis) -> None:
    """A scale of powers of ten as it stands, with ticks at 1, 2, 5, 10 as far as there is room."""
    low, high = axis.get_view_interval()
    subs = (1.0, 2.0, 5.0) if high < CROWDED * low else (1.0,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=8))
    axis.set_major_formatter(tick)
    axis.set_minor_formatter(NullFormatter())


def tick(value: float, _: float = 0.0) -> str:
    """12,300 as 12.3k."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def add_key(figure: Figure, columns: int) -> Legend:
    """What the drawn things are called, above them."""
    names = _names(figure)
    return figure.legend(
        list(names.values()), list(names), loc="outside upper left", ncols=min(columns, len(names))
    )


@contextmanager
def keyed(figure: Figure, columns: int) -> Generator[None, None, None]:
    """The figure with a key above it, for as long, and the room for it."""
    width, height = figure.get_size_inches()
    with drawing():
        key = add_key(figure, columns)
    figure.set_size_inches(width, height + KEY_LINE_INCHES * -(-len(_names(figure)) // columns))
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
    """Write a PNG or SVG file, as its name ends."""
    with drawing():
        figure.savefig(path, dpi=DOTS_PER_INCH)


def _names(figure: Figure) -> dict[str, Any]:
    """What is drawn by its name, each once."""
    named: dict[str, Any] = {}
    for axes in figure.axes:
        for shape, name in zip(*axes.get_legend_handles_labels(), strict=True):
            named.setdefault(name, shape)
    return named
