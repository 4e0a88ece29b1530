"""Values of a record against the types of its fields: choices, numbers and their bounds.

The configuration checks the same types with pydantic, which these files do without.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from dlrm_hybrid.bounds import Bound

BOUNDS: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("above", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("at most", operator.le),
}
NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


def check(record: Any) -> None:
    """Check all values of a frozen record, and store numbers of numpy as Python's own.

    Args:
        record: a dataclass instance; changed where it holds such numbers.

    Raises:
        ValueError: a value is not of its field's type or out of its bounds; names field, value
            and what it must be.
    """
    hints = _hints(record.__class__)
    for field in fields(record):
        value = _plain(getattr(record, field.name))
        object.__setattr__(record, field.name, value)
        if not _fits(value, hints[field.name]):
            kinds = " or ".join(_texts(hints[field.name]))
            raise ValueError(f"{type(record).__name__}: {field.name} = {value!r}: must be {kinds}")


def _plain(value: object) -> object:
    """Numbers of other types, such as numpy's, as those that equality and text are defined by."""
    if type(value) is tuple:
        return tuple(map(_plain, cast("tuple[object, ...]", value)))
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _fits(value: object, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return type(value) is str and value in parts
    if origin is Annotated:
        return _fits(value, parts[0]) and all(
            BOUNDS[name][1](value, bound) for name, bound in _bounds(parts[1:])
        )
    if origin is tuple:
        items = cast("Sequence[object]", value)
        return type(value) is tuple and all(_fits(item, parts[0]) for item in items)
    if kind is float:
        return type(value) in (int, float) and math.isfinite(cast("float", value))
    return type(value) is kind


def _texts(kind: Any) -> Iterator[str]:
    """What a value of this type is, in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for part in parts:
            yield from _texts(part)
    elif origin is Literal:
        yield from map(repr, parts)
    elif origin is Annotated:
        limits = " and ".join(f"{BOUNDS[name][0]} {bound:g}" for name, bound in _bounds(parts[1:]))
        yield f"{NAMES[parts[0]]} {limits}"
    elif origin is tuple:
        yield f"a tuple, each {' or '.join(_texts(parts[0]))}"
    else:
        yield "None" if kind is NoneType else NAMES[kind]


def _bounds(metadata: Sequence[Bound]) -> Iterator[tuple[str, float]]:
    """Names and values of bounds."""
    for bound in metadata:
        for name in BOUNDS:
            if (value := getattr(bound, name)) is not None:
                yield name, value
