"""How often a run may be started again after it has lost a rank."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final


@final
@dataclass(slots=True)
class Restarts:
    """Counts the restarts of a run; too many in a short time mean that another will not help.

    Attributes:
        limit: restarts in any stretch of time of the length of the window.
        window_seconds: its length.
    """

    limit: int
    window_seconds: float
    _times: list[float] = field(default_factory=list[float])

    @property
    def made(self) -> int:
        """Restarts until now."""
        return len(self._times)

    def another(self, now_seconds: float) -> int | None:
        """Take note of a restart: which one of the window it is, None if it is one too many.

        Args:
            now_seconds: of a clock that only goes forward.
        """
        recent = sum(time > now_seconds - self.window_seconds for time in self._times)
        if recent >= self.limit:
            return None
        self._times.append(now_seconds)
        return recent + 1
