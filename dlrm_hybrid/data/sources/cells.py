"""Parsing of single values, from CSV, Parquet, frames or JSON: numbers, categories, lists, times.

The same value means the same as text, as all of CSV is, and typed, as in JSON and Parquet. Times
are ISO 8601 or numbers since 1970: seconds, milli-, micro- or nanoseconds, judged by their size;
without a zone they are in UTC.
"""

from __future__ import annotations

import ast
import datetime
import json
import math
import re
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from decimal import Decimal
from typing import Any, cast

import xxhash

from dlrm_hybrid.data.schema import CategoricalColumn

NUMBER = r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?\s*"
_NUMBER = re.compile(rf"{NUMBER}|(?i:nan|[+-]?inf(inity)?)", re.ASCII)
_BOOLEANS = {"true": True, "false": False}
_SHOWN_CHARACTERS = 40
_SHOWN_BITS = 1 << 10
NOT_UTF8 = "is not UTF-8: save text in UTF-8, as `iconv -f LATIN1 -t UTF-8` does"
_NO_NUMBER = "is not a number; words for missing values are `missing_values` of the schema"


def plain_value(value: Any, missing: Collection[str] = ()) -> Any:
    """Convert a scalar of numpy or torch to Python's, and words for missing values to None."""
    value = value.item() if getattr(value, "shape", None) == () else value
    return None if isinstance(value, str) and value in missing else value


def is_missing(value: Any) -> bool:
    """Whether a plain value is missing: None, NaN or empty text."""
    if isinstance(value, (str, bytes)):  # most are
        return not value
    if isinstance(value, float):
        return value != value
    if isinstance(value, Decimal):  # comparing a signaling NaN raises
        return value.is_nan()
    return value is None


def boolean(text: str) -> bool | None:
    """Parse a truth value: `true` or `false` in upper or lower case; None for other text."""
    return _BOOLEANS.get(text.lower()) if len(text) <= len("false") else None


def text_of(value: str | bytes) -> str:
    """Decode bytes, and return text as it is; raises ValueError if bytes are not UTF-8."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise ValueError(NOT_UTF8) from None


def number(value: Any) -> float:
    """Convert a plain value, or parse its text, to a number; NaN for a missing one.

    Raises:
        ValueError: it is no number; the message continues a sentence that begins with the value.
    """
    if is_missing(value):
        return math.nan
    if isinstance(value, (str, bytes)):
        text = text_of(value)
        if _NUMBER.fullmatch(text):
            return float(text)
        value = boolean(text.strip())
        if value is None:
            raise ValueError(_NO_NUMBER)
    if isinstance(value, (int, float, Decimal)):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond all floats
            return math.inf if value > 0 else -math.inf
    raise ValueError("is not a number")


def is_number(value: Any) -> bool:
    """Whether a plain value, or its text, is a finite number."""
    try:
        return math.isfinite(number(value))
    except ValueError:
        return False


def shown(value: Any) -> str:
    """A value for messages: escaped and shortened, in printable ASCII."""
    if isinstance(value, int) and value.bit_length() > _SHOWN_BITS:  # Python refuses to print it
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, bytes):
        text = value.decode("utf-8", errors="backslashreplace")
        escaped = ascii(text[:_SHOWN_CHARACTERS]).replace("\\\\x", "\\x")
    else:
        text = value
        escaped = ascii(text[:_SHOWN_CHARACTERS] if isinstance(text, str) else text)[:80]
    return f"{escaped}…" if isinstance(text, str) and len(text) > _SHOWN_CHARACTERS else escaped


Key = str | int
"""A category: text, or a whole number in columns of integers or hashes."""

MISSING_INTEGER = -(2**63)
MISSING: Mapping[str, Key] = {"string": "", "integer": MISSING_INTEGER, "hash8": 0}
_NO_INTEGER = "is not an integer of 64 bits (kind: string takes longer ones)"
_INTEGER = re.compile(r"([+-]?[0-9]{1,19})(\.0*)?")
_FINITE = re.compile(NUMBER, re.ASCII)
_HASH8 = re.compile(r"[0-9a-fA-F]{8}")


def keys_of(values: Sequence[Any], column: CategoricalColumn) -> tuple[list[Key], dict[int, str]]:
    """The category of each plain value, and the fault of each invalid one by index."""
    faults: dict[int, str] = {}
    missing = MISSING[column.kind]
    if column.kind == "string" and {*map(type, values)} <= {str, type(None)}:
        keys = _texts(values)
    else:
        keys = _each(values, column, faults)
    if column.bucket is not None:
        keys = [log_squared(key) for key in keys]
    if column.hash_size:
        keys = [_hashed(key, missing, column.hash_size) for key in keys]
    return keys, faults


def _texts(values: Sequence[str | None]) -> list[Key]:
    """The categories of values that are all text: only truth values change their spelling."""
    texts = [value or "" for value in values]
    for index in [index for index, text in enumerate(texts) if len(text) in (4, 5)]:
        texts[index] = _string(texts[index])
    return [*texts]


def _each(values: Sequence[Any], column: CategoricalColumn, faults: dict[int, str]) -> list[Key]:
    reader, missing = _READERS[column.kind], MISSING[column.kind]
    replacement = column.missing if isinstance(column.missing, int) else missing
    keys: list[Key] = []
    for index, value in enumerate(values):
        try:
            keys.append(replacement if is_missing(value) else reader(value))
        except ValueError as error:
            faults[index] = f"{shown(value)} {error}"
            keys.append(missing)
    return keys


def log_squared(key: Key) -> Key:
    """Bucket numbers above 2 as ⌊ln(x)²⌋, in doubles like FuxiCTR."""
    return math.floor(math.log(key) ** 2) if isinstance(key, int) and key > 2 else key


def text_of_category(value: Any, column: CategoricalColumn) -> str | None:
    """The text that CSV would have for a plain value, None for a missing one.

    Raises:
        ValueError: it is no category; the message continues a sentence that begins with the value.
    """
    if is_missing(value):
        return None
    return str(_READERS["integer" if column.kind == "integer" else "string"](value))


def missing_key(column: CategoricalColumn) -> Key:
    """The key of a missing value among the categories of a column."""
    return MISSING_INTEGER if column.hash_size else MISSING[column.kind]


def _hashed(key: Key, missing: Key, size: int) -> Key:
    """Hash a key into one of `size` buckets; a missing value keeps a key of its own."""
    if key == missing:
        return MISSING_INTEGER
    if isinstance(key, str):
        return xxhash.xxh3_64_intdigest(key.encode()) % size
    return key % size


def _string(value: Any) -> str:
    if isinstance(value, (str, bytes)):
        text = text_of(value)
        truth = boolean(text)
        return text if truth is None else str(truth)
    if isinstance(value, (int, Decimal)):  # a float has more than one text: 5, 5.0, 5e0
        return str(value) if isinstance(value, int) else f"{value:f}"  # all digits, as in CSV
    if isinstance(value, float):
        raise ValueError("is a float, not text; kind: integer takes whole ones")
    raise ValueError("is not text (kind: string)")


def _integer(value: Any) -> int:
    if isinstance(value, (str, bytes)):
        text = text_of(value).strip()
        match = _INTEGER.fullmatch(text)  # pandas writes 3.0 if a column has missing values
        value = int(match[1]) if match else _whole(text)
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, Decimal) and value.is_finite():
        value = _whole(str(value))
    if not isinstance(value, int) or not MISSING_INTEGER < value < 2**63:
        raise ValueError(_NO_INTEGER)
    return int(value)


def _whole(text: str) -> int | None:
    """Parse a whole number written with an exponent or as a truth value; None if it is none."""
    if not _FINITE.fullmatch(text):
        return boolean(text)
    try:
        decimal = Decimal(text)
    except ArithmeticError:  # an exponent beyond all bounds
        return None
    if decimal.copy_abs() >= 2**64:  # as an integer it might fill the memory
        return 2**64
    return int(decimal) if int(decimal) == decimal else None


def _hash8(value: Any) -> int:
    text = _string(value)
    if not _HASH8.fullmatch(text):
        raise ValueError("is not eight hexadecimal digits")
    return int(text, 16)


_READERS: Mapping[str, Callable[[Any], Key]] = {
    "string": _string,
    "integer": _integer,
    "hash8": _hash8,
}


JSON = "json"
"""The separator for lists in brackets, of JSON or Python: `["a", "b"]`, `['a', 'b']`."""

_VALUE = r"""(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[-+.\w]+)\s*"""
# Commas are required: numpy prints arrays without, and Python would join 'a' 'b' to one text.
_PYTHON = re.compile(rf"\s*[\[(]\s*(?:{_VALUE}(?:,\s*{_VALUE})*,?\s*)?[\])]\s*", re.DOTALL)
_NO_LIST = 'is no list as ["a", "b"]'


def split_list(text: str, separator: str) -> list[str]:
    """Split the text of a list into its values; missing ones are empty.

    Args:
        separator: separates its values; or `json`, for lists in brackets.

    Raises:
        ValueError: it is no list in brackets, or contains lists or objects.
    """
    if separator != JSON:
        return text.split(separator)
    values: Any = _read(text) if text.strip() else None
    if values is None:
        return []
    if not isinstance(values, (list, tuple)):
        raise ValueError(_NO_LIST)
    return [_text(value) for value in cast("list[Any]", values)]


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if not _PYTHON.fullmatch(text):
            raise ValueError(_NO_LIST) from None
    try:
        with warnings.catch_warnings(action="ignore"):  # on invalid escapes
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


FORM = "a time as 2024-03-01 12:00:00, 2024-03-01T12:00:00.5+02:00 or seconds since 1970"
_EPOCH = datetime.date(1970, 1, 1).toordinal()
_ISO = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})"
    r"(?:[T ]([0-9]{2})(?::?([0-9]{2})(?::?([0-9]{2})(?:[.,]([0-9]+))?)?)?"
    r" ?(Z|UTC|[+-][0-9]{2}(?::?[0-9]{2})?)?)?",
    re.IGNORECASE,
)
# Smaller numbers might be days, or dates such as 20240301; 1e8 seconds are March of 1973.
_SMALLEST = 10**8
# Numbers below these are seconds, milli- and microseconds; the second item shifts to nanoseconds.
_UNITS = ((10**11, 9), (10**14, 6), (10**17, 3))


def instant(text: str) -> int | None:
    """Parse a time to microseconds since 1970, rounded down; None if it is no time."""
    moment = nanoseconds(text)
    return None if moment is None else moment // 1000


def nanoseconds(text: str) -> int | None:
    """Parse a time to nanoseconds since 1970, rounded down; None if it is no time."""
    text = text.strip()
    match = _ISO.fullmatch(text)
    if match is None:
        return _since_epoch(text) if _FINITE.fullmatch(text) else None
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    is_midnight = hour == 24 and not minute and not second and not int(match[7] or 0)
    offset = _offset(match[8] or "Z")
    if (hour > 23 and not is_midnight) or minute > 59 or second > 59 or offset is None:
        return None
    try:
        days = datetime.date(year, month, day).toordinal() - _EPOCH
    except ValueError:
        return None
    seconds = (days * 24 + hour) * 3600 + minute * 60 + second - offset
    return seconds * 10**9 + int((match[7] or "0")[:9].ljust(9, "0"))


def _offset(zone: str) -> int | None:
    """Seconds that a zone is ahead of UTC; None if there is no such zone."""
    digits = re.sub("[^0-9]", "", zone).ljust(4, "0")
    hours, minutes = int(digits[:2]), int(digits[2:])
    if hours > 23 or minutes > 59:
        return None
    seconds = hours * 3600 + minutes * 60
    return -seconds if zone.startswith("-") else seconds


def _since_epoch(text: str) -> int | None:
    """Convert a number since 1970, its unit judged by its size, to nanoseconds; None if no time."""
    try:
        number = Decimal(text)
    except ArithmeticError:  # an exponent beyond all bounds
        return None
    size = number.copy_abs()
    if size < _SMALLEST or size >= 2**63:
        return None
    digits = next((digits for below, digits in _UNITS if size < below), 0)
    return math.floor(number.scaleb(digits))
