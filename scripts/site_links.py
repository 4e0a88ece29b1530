"""A hook of mkdocs for pages that are also read in a checkout.

Links to files of the project, which are no pages of the site, become the file's name; links that
are named by a page's file get the page's title.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any

_PAGE = re.compile(r"\[([\w/]+\.md)\]\(([^)\s#]+\.md)\)")
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

    def titled(link: re.Match[str]) -> str:
        text, target = link.groups()
        if Path(text).name != Path(target).name:
            return link[0]
        title = Path(normpath(folder / target)).read_text("utf-8").partition("\n")[0]
        return f"[{title.lstrip('# ')}]({target})"

    return _PAGE.sub(titled, _LINK.sub(named, markdown))
