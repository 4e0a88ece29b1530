"""What stands in the code blocks of a page in docs/."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def _blocks(page: str, kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", (DOCS / page).read_text("utf-8"), re.DOTALL)


def files(page: str) -> dict[str, str]:
    """Programs by the name in their first line."""
    return {text.split()[1]: text for text in _blocks(page, "python")}


def commands(page: str) -> list[str]:
    """The lines to type."""
    return [line for text in _blocks(page, "sh") for line in text.splitlines()]
