"""Display as protocols: lines, bars, and the view of a training run.

The terminal of `cli/` implements these; nothing below `cli/` draws.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from dlrm_hybrid.telemetry.events import Event


class Bar(Protocol):
    """Progress towards a known or unknown end."""

    def update(self, done: float, total: float | None, text: str) -> None:
        """Show `done` of `total`, with a text beside it."""
        ...


class Count(Protocol):
    """Progress in units, with their speed."""

    def __call__(
        self, done: float, total: float | None, stage: str = "", unit: str | None = None
    ) -> None:
        """Show `done` of `total`.

        Args:
            done: amount since the beginning of the file or stage.
            total: amount at the end, None if unknown.
            stage: name shown before the speed; each stage has its own speed.
            unit: unit of this stage; None for the counter's.
        """
        ...


class Display(Protocol):
    """Shows lines and progress to the user, or writes them to a log."""

    def line(self, text: str) -> None:
        """Show a line, above a bar if there is one."""
        ...

    def line_once(self, text: str) -> None:
        """Show a line unless this display has shown it before."""
        ...

    def bar(self, label: str, *, is_late: bool = False) -> AbstractContextManager[Bar]:
        """Show a bar inside a `with`; within another's it replaces that.

        Args:
            label: name of the activity.
            is_late: show it only if it takes a while, and erase it at the end. Only its updates
                redraw it, so that no thread draws beside what is measured.
        """
        ...

    def counter(
        self, label: str, unit: str, *, is_late: bool = False
    ) -> AbstractContextManager[Count]:
        """Show a bar with a speed inside a `with`.

        Args:
            label: name of the activity.
            unit: unit of the count, as `rows`; the speed of `bytes` is in MB/s.
            is_late: as for `bar`.
        """
        ...


class TrainingView(Protocol):
    """Shows events of a run's ranks, and its result."""

    def live(self) -> AbstractContextManager[Callable[[Event], None]]:
        """Show the events given to the function, inside a `with`."""
        ...

    def result(
        self, path: Path, summary: Mapping[str, Any], teacher: Mapping[str, Any] | None
    ) -> None:
        """Show the result of a complete run.

        Args:
            path: path of `summary.json`.
            summary: its content.
            teacher: scores of the teacher model of synthetic rows, None for other rows.
        """
        ...
