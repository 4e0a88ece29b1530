"""Tables in Markdown that are aligned as plain text too."""

from __future__ import annotations

from collections.abc import Sequence

MISSING = "–"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], is_number: Sequence[bool]) -> str:
    """A table with its last line ended; columns of numbers stand to the right.

    Args:
        columns: headings.
        rows: cells as they are to be read; a bar in one does not end it.
        is_number: of each column.
    """
    lines = [[_kept(cell) for cell in line] for line in (columns, *rows)]
    widths = [max(3, *(len(line[i]) for line in lines)) for i in range(len(columns))]
    rule = [
        "-" * (width - 1) + ":" if right else "-" * width
        for width, right in zip(widths, is_number, strict=True)
    ]
    head, *body = (_line(line, widths, is_number) for line in lines)
    return "\n".join([head, _line(rule, widths, is_number), *body]) + "\n"


def _kept(cell: str) -> str:
    return " ".join(cell.replace("|", "\\|").split())


def _line(cells: Sequence[str], widths: Sequence[int], is_number: Sequence[bool]) -> str:
    padded = [
        cell.rjust(width) if right else cell.ljust(width)
        for cell, width, right in zip(cells, widths, is_number, strict=True)
    ]
    return "| " + " | ".join(padded) + " |"
