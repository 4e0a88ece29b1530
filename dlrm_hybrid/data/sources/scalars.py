"""What one value means, whether CSV, Parquet, a frame or JSON holds it.

Text and typed values are held against each other here: a column of CSV has text alone, JSON and
Parquet say of a value whether it is text, a number or a truth value.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from decimal import Decimal
from typing import Any

NUMBER = r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*"
_NUMBER = re.compile(rf"{NUMBER}|(?i:nan|[+-]?inf(inity)?)", re.ASCII)
_BOOLEANS = {"true": True, "false": False}
_SHOWN_CHARACTERS = 40
_SHOWN_BITS = 1 << 10


def plain_value(value: Any, missing: Collection[str] = ()) -> Any:
    """A scalar of numpy or torch as Python has it, and None for words that are missing values."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return None if isinstance(value, str) and value in missing else value


def is_missing(value: Any) -> bool:
    """Whether a plain value is nothing: None, NaN or an empty text."""
    if isinstance(value, (str, bytes)):  # most are
        return not value
    if isinstance(value, float):
        return value != value
    if isinstance(value, Decimal):  # which may be a NaN that no comparison takes
        return value.is_nan()
    return value is None


def boolean(text: str) -> bool | None:
    """What a text says as a truth value: `true` and `false` in any case; None for others."""
    return _BOOLEANS.get(text.lower()) if len(text) <= len("false") else None


def text_of(value: str | bytes) -> str:
    """Text as it is, and bytes decoded.

    Raises:
        ValueError: they are not UTF-8.
    """
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None


def number(value: Any) -> float:
    """The number that a plain value is, or that its text says; NaN for a missing one.

    Raises:
        ValueError: it is none; says why, to stand behind the value.
    """
    if is_missing(value):
        return math.nan
    if isinstance(value, (str, bytes)):
        text = text_of(value)
        if _NUMBER.fullmatch(text):
            return float(text)
        value = boolean(text.strip())
    if isinstance(value, (int, float, Decimal)):
        try:
            return float(value)
        except OverflowError:  # a whole number that no float is near to
            return math.inf if value > 0 else -math.inf
    raise ValueError("is not a number")


def is_number(value: Any) -> bool:
    """Whether a plain value is a finite number, or its text says one."""
    try:
        return math.isfinite(number(value))
    except ValueError:
        return False


def shown(value: Any) -> str:
    """The value, escaped and shortened, in printable ASCII."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python refuses to spell it
        return f"a whole number of {value.bit_length()} bits"
    text = value.decode("utf-8", errors="backslashreplace") if isinstance(value, bytes) else value
    escaped = ascii(text[:_SHOWN_CHARACTERS] if isinstance(text, str) else text)[:80]
    return f"{escaped}…" if isinstance(text, str) and len(text) > _SHOWN_CHARACTERS else escaped
