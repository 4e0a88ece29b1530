"""A table of texts, rendered as Markdown, as HTML or for a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as escape_html
from typing import TYPE_CHECKING, TypeVar, final

from dlrm_hybrid.telemetry.summary import COMPLETE
from dlrm_hybrid.types import printable

if TYPE_CHECKING:
    import pandas as pd
    import rich.table

MISSING = "–"
Number = TypeVar("Number", bound=float)
_MARKUP = re.compile(r"(?<=\])\(|\|")


@final
@dataclass(frozen=True, slots=True)
class Table:
    """A table of formatted cells.

    Attributes:
        align: a letter for each column, `l` or `r`; the last one holds for the rest.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = "lr"

    @classmethod
    def of(cls, texts: pd.DataFrame, align: str) -> Table:
        """Make a table from a frame of texts, without its index."""
        return cls(tuple(map(str, texts)), tuple(texts.itertuples(index=False, name=None)), align)

    def markdown(self) -> str:
        """Render the table as Markdown that is also aligned as plain text; ends with a newline."""
        lines = [[plain_markdown(cell) for cell in line] for line in (self.columns, *self.rows)]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        right = self._is_right()
        rule = [
            f"{'-' * (width - 1)}:" if is_right else "-" * width
            for width, is_right in zip(widths, right, strict=True)
        ]
        texts: list[str] = []
        for line in (lines[0], rule, *lines[1:]):
            cells = zip(line, widths, right, strict=True)
            padded = (cell.rjust(width) if at else cell.ljust(width) for cell, width, at in cells)
            texts.append(f"| {' | '.join(padded)} |\n")
        return "".join(texts)

    def html(self) -> str:
        """Render the table as HTML, escaped; a status other than complete is highlighted."""
        kinds = [' class="number"' if right else "" for right in self._is_right()]
        head = "".join(
            f'<th{kind} scope="col">{escape(column)}</th>'
            for column, kind in zip(self.columns, kinds, strict=True)
        )
        status = self.columns.index("status") if "status" in self.columns else None
        lines: list[str] = []
        for row in self.rows:
            css = list(kinds)
            if status is not None and row[status] != COMPLETE:
                css[status] = ' class="bad"'
            cells = (f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, css, strict=True))
            lines.append(f"<tr>{''.join(cells)}</tr>\n")
        return (
            '<div class="wide"><table>\n'
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(lines)}</tbody>\n</table></div>"
        )

    def rich(self) -> rich.table.Table:
        """Render the table for a terminal; control characters are escaped."""
        import rich.table  # takes 0.1 s, which a page does not need
        from rich.text import Text

        drawn = rich.table.Table()
        for column, right in zip(self.columns, self._is_right(), strict=True):
            drawn.add_column(Text(printable(column)), justify="right" if right else "left")
        for row in self.rows:
            drawn.add_row(*(Text(printable(cell)) for cell in row))
        return drawn

    def _is_right(self) -> list[bool]:
        align = self.align.ljust(len(self.columns), self.align[-1])
        return [letter == "r" for letter in align[: len(self.columns)]]


def cell(value: Number | None, show: Callable[[Number], str] = "{:.4f}".format) -> str:
    """A figure as a cell, by default with four decimal places; a dash where there is none."""
    return MISSING if value is None else show(value)


def plain_markdown(text: str) -> str:
    """Escape a text for a cell of Markdown: no HTML, links, pictures, line ends or cell ends."""
    return " ".join(_MARKUP.sub(r"\\\g<0>", escape_html(printable(text), quote=False)).split())


def escape(text: str) -> str:
    """Escape a text for HTML, control characters too."""
    return escape_html(printable(text))
