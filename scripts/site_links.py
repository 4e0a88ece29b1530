"""A hook of mkdocs: what the pages need that are also read in a checkout.

There links lead to files of the project, which are no pages: such a link becomes the file's name.
"""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from posixpath import normpath
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)\s#]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Called by mkdocs with the text of each page."""
    folder = PurePosixPath("docs", page.file.src_uri).parent

    def named(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = normpath(folder / target)
        if PurePosixPath(path).parts[0] == "docs":
            return link[0]
        return f"`{path}`" if path.endswith(text.strip("`")) else f"{text} (`{path}`)"

    return _LINK.sub(named, markdown)
