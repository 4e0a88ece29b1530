"""Amounts over time in a bounded number of points."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

MOST_POINTS = 512


@final
@dataclass(slots=True)
class Series:
    """Points that become twice as long whenever there are too many.

    Attributes:
        point_seconds: least length of a point.
        points: for each its start, its length, and the amounts in it.
    """

    point_seconds: float = 0.1
    points: list[list[float]] = field(default_factory=list[list[float]])

    def add(self, start_seconds: float, seconds: float, *amounts: float) -> None:
        """Count a window that follows those before; there may be a gap between them."""
        window = [start_seconds, seconds, *amounts]
        if self.points and self.points[-1][1] < 0.99 * self.point_seconds:
            _join(self.points[-1], window)
            return
        self.points.append(window)
        if len(self.points) > MOST_POINTS:
            self.point_seconds *= 2
            self._halve()

    def since(self, offset_seconds: float) -> list[list[float]]:
        """The points, their starts later by an offset."""
        return [[start + offset_seconds, *rest] for start, *rest in self.points]

    def _halve(self) -> None:
        kept = self.points[::2]
        for point, other in zip(kept, self.points[1::2], strict=False):
            _join(point, other)
        self.points = kept


def _join(point: list[float], other: list[float]) -> None:
    for column in range(1, len(point)):
        point[column] += other[column]
