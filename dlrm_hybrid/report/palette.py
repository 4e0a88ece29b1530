"""Colours and dashes that tell lines and bars apart, also for eyes that see few colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dlrm_hybrid.telemetry.spans import Span

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#5b4b8a", "#555555")
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))
MARKERS = ("o", "s", "^", "X")
# Of bars, which are never runs. The classes of traffic come in pairs: there and back.
PARTS = ("#3b6ea5", "#9cc3e6", "#d9772b", "#f7bf86", "#4f9d4f", "#a9a9a9", "#8a6bb1", "#c9b3dd")
PALE = "#e4e4e4"


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
