"""A report as Markdown."""

from __future__ import annotations

from pathlib import Path

from dlrm_hybrid.report import axes
from dlrm_hybrid.report.document import Document, Picture, Section

FILE_SUFFIX = ".png"


def text(document: Document, pictures: str | None) -> str:
    """The page; without pictures, sections that have nothing else are left out.

    Args:
        document: of the report.
        pictures: the folder of their files, from where the page lies; None leaves them out.
    """
    parts = [f"# {document.title}\n\n{document.subtitle}\n\n{document.trained}\n"]
    parts += [
        _section(section, pictures)
        for section in document.sections
        if section.table is not None or pictures is not None
    ]
    return "\n".join(parts)


def file_name(picture: Picture) -> str:
    """Of its file: `loss_over_training_steps.png`."""
    return picture.title.lower().replace(" ", "_") + FILE_SUFFIX


def write_pictures(document: Document, folder: Path) -> None:
    """Each picture as a file of its own, with the key that the page has beside it."""
    for section in document.sections:
        for picture in section.pictures:
            with picture.alone() as figure:
                axes.save(figure, folder / file_name(picture))


def _section(section: Section, pictures: str | None) -> str:
    parts = [f"## {section.heading}\n"]
    if section.text:
        parts.append(f"{section.text}\n")
    table = section.table
    if table is not None:
        parts.append(table.markdown())
    if pictures is not None:
        parts += [
            f"![{one.title}]({pictures}/{file_name(one)})\n\n{one.title}. {one.caption}\n"
            for one in section.pictures
        ]
    return "\n".join(parts)
