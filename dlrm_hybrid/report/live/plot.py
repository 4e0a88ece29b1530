"""Lines as SVG in a page, in a millisecond: a page that is made every few seconds waits for none.

Text and axes have the page's own colours, so it is as readable on dark as on light.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from statistics import mean, median
from typing import final

from dlrm_hybrid.report.measures import integer

WIDTH, HEIGHT = 520, 246
LEFT, RIGHT, TOP, BOTTOM = 64, 26, 10, 40  # of the area of the curve, within that
MOST_POINTS = 400  # of a line; more are drawn as their means
OUTLIER = 3.0  # times the median: what is above runs out of the picture, as in a report
FEWEST_TICKS = 4
DOT_RADIUS = 3.5

Point = tuple[float, float]
At = Callable[[float, float], Point]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A line over training steps, and dots.

    Attributes:
        title: what is drawn.
        line: its points, by step.
        dots: points of something else, with a name for them below the picture.
        dots_name: what they are.
        from_zero: the axis begins at 0.
        note: a sentence below the picture.
    """

    title: str
    line: Sequence[Point]
    dots: Sequence[Point] = ()
    dots_name: str = ""
    from_zero: bool = False
    note: str = ""

    def svg(self) -> str:
        """The picture as an element of a page; empty where there is nothing to draw."""
        line, points = thinned(self.line), [*self.line, *self.dots]
        if not points:
            return ""
        low, high = self._range()
        ys = ticks(low, high)
        xs = ticks(0.0, max(x for x, _ in points) or 1.0)
        bottom, top, last = ys[0], ys[-1], xs[-1]

        def at(x: float, y: float) -> tuple[float, float]:
            across, up = x / last, (min(y, top) - bottom) / (top - bottom)
            return (
                round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
                round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
            )

        drawn = " ".join(f"{x},{y}" for x, y in (at(*point) for point in line))
        marks = _circles([at(*point) for point in thinned(self.dots)])
        alone = _circles([at(*line[0])]) if len(line) == 1 else ""  # no line goes through it
        caption = f"Dots: {self.dots_name}." if self.dots and self.dots_name else self.note
        return (
            f"<figure><h3>{escape(self.title)}</h3>"
            f'<svg class="plot" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'aria-label="{escape(self.title)} over training steps">'
            f"{_axes(xs, ys, at)}"
            f'<polyline class="line" points="{drawn}"/>'
            f'<g class="alone">{alone}</g><g class="dots">{marks}</g></svg>'
            f"<figcaption>{escape(caption)}</figcaption></figure>"
        )

    def _range(self) -> tuple[float, float]:
        """All that is drawn is in sight, but outliers of the line."""
        values, dots = [y for _, y in self.line], [y for _, y in self.dots]
        limit = OUTLIER * median(values) if values else 0.0
        if limit > 0:
            values = [value for value in values if value <= limit]
        shown = [*values, *dots, *([0.0] if self.from_zero else [])]
        return min(shown), max(shown)


def thinned(points: Sequence[Point]) -> list[Point]:
    """No more than `MOST_POINTS`: means of as many neighbours, so that no spike is lost whole."""
    size = -(-len(points) // MOST_POINTS) or 1
    groups = (points[begin : begin + size] for begin in range(0, len(points), size))
    return [(mean(x for x, _ in one), mean(y for _, y in one)) for one in groups]


def ticks(low: float, high: float) -> list[float]:
    """Round numbers around a range: steps of 1, 2 or 5 times a power of ten."""
    if not high > low:
        low, high = low - abs(low) / 10 - 1e-9, high + abs(high) / 10 + 1e-9
    rough = (high - low) / FEWEST_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [number * step for number in range(first, last + 1)]


def _circles(places: Sequence[Point]) -> str:
    return "".join(f'<circle cx="{x}" cy="{y}" r="{DOT_RADIUS}"/>' for x, y in places)


def _axes(xs: Sequence[float], ys: Sequence[float], at: At) -> str:
    parts: list[str] = []
    for value in ys:
        _, y = at(0.0, value)
        parts.append(f'<path class="grid" d="M{LEFT} {y}H{WIDTH - RIGHT}"/>')
        parts.append(
            f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{_text(value, ys)}</text>'
        )
    for value in xs:
        x, _ = at(value, ys[0])
        parts.append(
            f'<text x="{x}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{integer(value)}</text>'
        )
    parts.append(
        f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 6}" text-anchor="end">training steps</text>'
    )
    return f'<g class="axes">{"".join(parts)}</g>'


def _text(value: float, values: Sequence[float]) -> str:
    """With as many decimals as tell it from the next one."""
    step = values[1] - values[0]
    if step >= 1:
        return integer(value)
    return f"{value:.{min(6, -math.floor(math.log10(step)))}f}" if value else "0"
