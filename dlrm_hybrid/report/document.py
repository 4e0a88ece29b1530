"""What a report is made of, before it is HTML or Markdown."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import final

from matplotlib.figure import Figure

from dlrm_hybrid.report.axes import keyed
from dlrm_hybrid.report.table import Table

KEY_COLUMNS = 2


@final
@dataclass(frozen=True, slots=True)
class Picture:
    """A picture with its title and what there is to know about it.

    Attributes:
        title: of the picture.
        figure: the picture.
        caption: what there is to know.
        has_key: its lines are the runs, in their colours; which is which is told beside it.
    """

    title: str
    figure: Figure
    caption: str
    has_key: bool

    @contextmanager
    def alone(self) -> Generator[Figure, None, None]:
        """The figure with its key in it, for as long."""
        with keyed(self.figure, KEY_COLUMNS) if self.has_key else nullcontext():
            yield self.figure


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A part of a report.

    Attributes:
        heading: of the part.
        text: a paragraph, or nothing.
        table: figures, if there are any.
        pictures: below the table.
    """

    heading: str
    text: str
    table: Table | None
    pictures: tuple[Picture, ...]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A whole report.

    Attributes:
        title: of the page.
        subtitle: when and by what it was made.
        trained: what was trained, in a line.
        runs: their labels, in the order of their colours.
        sections: top to bottom.
    """

    title: str
    subtitle: str
    trained: str
    runs: tuple[str, ...]
    sections: tuple[Section, ...]
