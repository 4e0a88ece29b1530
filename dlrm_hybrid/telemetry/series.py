"""Traffic over time in a bounded number of points."""

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
        points: for each its start, its length, and the bytes received and sent in it.
    """

    point_seconds: float = 0.1
    points: list[list[float]] = field(default_factory=list[list[float]])

    def add(
        self, start_seconds: float, seconds: float, received_bytes: int, sent_bytes: int
    ) -> None:
        """Count a window that follows those before; there may be a gap between them."""
        window = [start_seconds, seconds, received_bytes, sent_bytes]
        if self.points and self.points[-1][1] < 0.99 * self.point_seconds:
            _join(self.points[-1], window)
            return
        self.points.append(window)
        if len(self.points) > MOST_POINTS:
            self.point_seconds *= 2
            self._halve()

    def _halve(self) -> None:
        kept = self.points[::2]
        for point, other in zip(kept, self.points[1::2], strict=False):
            _join(point, other)
        self.points = kept


def _join(point: list[float], other: list[float]) -> None:
    for column in range(1, len(point)):
        point[column] += other[column]
