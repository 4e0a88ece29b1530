"""A report as Markdown: its tables, without the pictures."""

from __future__ import annotations

from dlrm_hybrid.report.document import Document, Section
from dlrm_hybrid.telemetry import markdown


def text(document: Document) -> str:
    """The page; sections that have only pictures are left out."""
    parts = [f"# {document.title}\n\n{document.subtitle}\n"]
    parts += [_section(section) for section in document.sections if section.table is not None]
    return "\n".join(parts)


def _section(section: Section) -> str:
    text = f"{section.text}\n\n" if section.text else ""
    table = section.table
    rows = "" if table is None else markdown.table(table.columns, table.rows, table.is_number)
    return f"## {section.heading}\n\n{text}{rows}"
