"""A report as one HTML file that needs nothing beside it: no script, no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dlrm_hybrid.report.axes import svg
from dlrm_hybrid.report.document import Document, Picture, Section
from dlrm_hybrid.report.palette import style

STYLE_FILE = Path(__file__).with_name("page.css")
MARKERS = {
    "o": '<circle cx="16" cy="5" r="4"/>',
    "s": '<rect x="12" y="1" width="8" height="8"/>',
    "^": '<path d="M16 0l5 9h-10z"/>',
    "X": '<path d="M12 0h3l1 2 1-2h3v10h-3l-1-2-1 2h-3z"/>',
}


def html(document: Document) -> str:
    """The page; every text of the document is escaped."""
    body = "\n".join(_section(section, document.runs) for section in document.sections)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(document.title)}</title>
<style>
{STYLE_FILE.read_text(encoding="utf-8")}</style>
</head>
<body>
<h1>{escape(document.title)}</h1>
<p class="subtitle">{escape(document.subtitle)}</p>
<p>{escape(document.trained)}</p>
{body}
</body>
</html>
"""


def _section(section: Section, runs: Sequence[str]) -> str:
    parts = [f"<h2>{escape(section.heading)}</h2>"]
    if section.text:
        parts.append(f"<p>{escape(section.text)}</p>")
    if section.table is not None:
        parts.append(section.table.html())
    if section.pictures:
        parts.append(pictures_html(section.pictures, runs))
    return "\n".join(parts)


def pictures_html(pictures: Sequence[Picture], runs: Sequence[str]) -> str:
    """Pictures side by side as far as there is room, below the key to the colours of the runs."""
    key = f"{_key(runs)}\n" if any(picture.has_key for picture in pictures) else ""
    figures = "\n".join(_figure(picture) for picture in pictures)
    return f'{key}<div class="pictures">\n{figures}\n</div>'


def _key(runs: Sequence[str]) -> str:
    """Which line is which run."""
    items: list[str] = []
    for number, label in enumerate(runs):
        drawn = style(number)
        dashes = f' stroke-dasharray="{" ".join(map(str, drawn.dashes))}"' if drawn.dashes else ""
        line = f'<path d="M0 5h32" stroke="{drawn.color}" stroke-width="3"{dashes}/>'
        mark = f'<g fill="{drawn.color}">{MARKERS[drawn.marker]}</g>'
        swatch = f'<svg viewBox="0 0 32 10" aria-hidden="true">{line}{mark}</svg>'
        items.append(f"<li>{swatch}{escape(label)}</li>")
    return f'<ul class="key">{"".join(items)}</ul>'


def _figure(picture: Picture) -> str:
    data = b64encode(svg(picture.figure)).decode("ascii")
    title = escape(picture.title)
    return (
        f'<figure><h3>{title}</h3><img alt="{title}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )
