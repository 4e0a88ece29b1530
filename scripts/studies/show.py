"""Tables and pictures for notebooks, which display objects that have `_repr_html_`."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from typing import final

from matplotlib.figure import Figure

from dlrm_hybrid.report.drawing import figure, svg
from dlrm_hybrid.report.figures import Picture
from dlrm_hybrid.report.table import Table

NOTHING = "<p>These runs have not measured it.</p>"


@final
@dataclass(frozen=True, slots=True)
class Shown:
    """A piece of a page."""

    html: str

    def _repr_html_(self) -> str:
        return self.html


def show(*things: str | Table | Figure | Iterable[Picture] | None) -> Shown:
    """All of them, one below the other: headings, tables, pictures side by side.

    What is None is left out; if that is all, it says so.
    """
    parts = [_html(thing) for thing in things if thing is not None]
    return Shown("\n".join(part for part in parts if part) or NOTHING)


def _html(thing: str | Table | Figure | Iterable[Picture]) -> str:
    if isinstance(thing, str):
        return f"<h4>{escape(thing)}</h4>"
    if isinstance(thing, Table):
        return thing.html()
    if isinstance(thing, Figure):
        return _image(thing, "")
    figures = "\n".join(_figure(picture) for picture in thing)
    return (
        figures and f'<div style="display: flex; flex-wrap: wrap; gap: 1.5rem">\n{figures}\n</div>'
    )


def _figure(picture: Picture) -> str:
    """With the key that a page has beside it."""
    image = _image(figure(picture, is_alone=True), picture.title)
    return (
        f'<figure style="margin: 0; max-width: 28rem"><strong>{escape(picture.title)}</strong>'
        f"{image}<figcaption>{escape(picture.caption)}</figcaption></figure>"
    )


def _image(drawn: Figure, title: str) -> str:
    source = f"data:image/svg+xml;base64,{b64encode(svg(drawn)).decode('ascii')}"
    width = f"width: 100%; max-width: {drawn.get_figwidth()}in"
    return f'<img style="{width}; background: white" alt="{escape(title)}" src="{source}">'
