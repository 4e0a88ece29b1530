"""Lists in text: with a separator between their values, or as JSON and Python write them."""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any, cast

JSON = "json"
"""The separator of lists in JSON, or as Python prints them: `["a", "b"]`, `['a', 'b']`."""

_VALUE = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[-+.\w]+)\s*"""
# A comma between all values: Python joins 'a' 'b', as numpy prints arrays, to one text.
_PYTHON = re.compile(rf"\s*[\[(]\s*(?:{_VALUE}(?:,\s*{_VALUE})*,?\s*)?[\])]\s*", re.DOTALL)
_NO_LIST = 'is no list as ["a", "b"]'


def split_list(text: str, separator: str) -> list[str]:
    """The values of a list as texts; those that are missing are empty.

    Args:
        text: of the list.
        separator: between its values; or `json`, for lists with brackets.

    Raises:
        ValueError: it is no list in brackets, or has lists or objects in it.
    """
    if separator != JSON:
        return text.split(separator)
    values: Any = _read(text) if text.strip() else None
    if values is None:
        return []
    if not isinstance(values, (list, tuple)):
        raise ValueError(_NO_LIST)
    return [_text(one) for one in cast("list[Any]", values)]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if not _PYTHON.fullmatch(text):
            raise ValueError(_NO_LIST) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # of odd escapes
            return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise ValueError(_NO_LIST) from None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if value is None or value != value:  # NaN
        return ""
    if not isinstance(value, (int, float)):
        raise ValueError(f"has {type(value).__name__} values in it")
    return json.dumps(value)
