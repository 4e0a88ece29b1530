"""From values of a column of categories to the categories: kinds, buckets, hashes, missing ones."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

import xxhash

from dlrm_hybrid.data.schema import CategoricalColumn
from dlrm_hybrid.data.sources.scalars import (
    NUMBER,
    boolean,
    is_missing,
    shown,
    text_of,
)

Key = str | int
"""A category: text, or a whole number where the column has such or hashes."""

MISSING_INTEGER = -(2**63)
MISSING: Mapping[str, Key] = {"string": "", "integer": MISSING_INTEGER, "hash8": 0}
_NO_INTEGER = "is not an integer of 64 bits (kind: string takes longer ones)"
_INTEGER = re.compile(r"([+-]?[0-9]{1,19})(\.0*)?")
_NUMBER = re.compile(NUMBER, re.ASCII)
_HASH8 = re.compile(r"[0-9a-fA-F]{8}")


def keys_of(values: Sequence[Any], column: CategoricalColumn) -> tuple[list[Key], dict[int, str]]:
    """The category of each plain value, and what is wrong with those that are none."""
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
    """The categories of nothing but text, of which only truth values are not what they are."""
    texts = [value or "" for value in values]
    for index in [index for index, text in enumerate(texts) if len(text) in (4, 5)]:
        texts[index] = _string(texts[index])
    return [*texts]


def _each(values: Sequence[Any], column: CategoricalColumn, faults: dict[int, str]) -> list[Key]:
    read, missing = _READERS[column.kind], MISSING[column.kind]
    taken = column.missing if isinstance(column.missing, int) else missing
    keys: list[Key] = []
    for index, value in enumerate(values):
        try:
            keys.append(taken if is_missing(value) else read(value))
        except ValueError as error:
            faults[index] = f"{shown(value)} {error}"
            keys.append(missing)
    return keys


def log_squared(key: Key) -> Key:
    """⌊ln(x)²⌋ of numbers above 2, in doubles as FuxiCTR computes it."""
    return math.floor(math.log(key) ** 2) if isinstance(key, int) and key > 2 else key


def text_of_category(value: Any, column: CategoricalColumn) -> str | None:
    """A plain value as CSV has it, None for a missing one.

    Raises:
        ValueError: it is no category; says why, to stand behind the value.
    """
    if is_missing(value):
        return None
    return str(_READERS["integer" if column.kind == "integer" else "string"](value))


def missing_key(column: CategoricalColumn) -> Key:
    """What stands for a missing value among the categories of a column."""
    return MISSING_INTEGER if column.hash_size else MISSING[column.kind]


def _hashed(key: Key, missing: Key, size: int) -> Key:
    """One of `size` numbers; a missing value stays one of its own."""
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
        found = _INTEGER.fullmatch(text)  # others write 3.0 where a column has missing values
        value = int(found[1]) if found else _whole(text)
    elif isinstance(value, float) and value.is_integer():
        value = int(value)
    elif isinstance(value, Decimal) and value.is_finite():
        value = _whole(str(value))
    if not isinstance(value, int) or not MISSING_INTEGER < value < 2**63:
        raise ValueError(_NO_INTEGER)
    return int(value)


def _whole(text: str) -> int | None:
    """The whole number that is written with an exponent or as a truth value, if it is one."""
    if not _NUMBER.fullmatch(text):
        return boolean(text)
    try:
        found = Decimal(text)
    except ArithmeticError:  # an exponent beyond all bounds
        return None
    if found.copy_abs() >= 2**64:  # the integer itself might fill the memory
        return 2**64
    return int(found) if int(found) == found else None


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
