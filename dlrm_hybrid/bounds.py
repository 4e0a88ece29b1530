"""Annotated types for settings, with their ranges, and the check of a record against its types.

Pydantic reads the same ranges but is not imported: the compressors work without it.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

if TYPE_CHECKING:
    from pydantic import ConfigDict

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
RATE_PATTERN = r"^\d{1,9}(\.\d{1,9})?[kmg]bit$"
TIME_PATTERN = r"^\d{1,9}(\.\d{1,9})?(us|ms|s)$"
PAGE_PATTERN = r"[^/]\.html$"
DEVICE_PATTERN = r"^(cpu|cuda(:[0-9]{1,3})?)$"
OPTION_PATTERN = r"^--[a-z][a-z-]*(=[^\n]*)?$"
# Error messages by pattern.
PATTERNS = {
    NAME_PATTERN: "must be letters, digits and . _ - only, and begin with a letter or digit",
    RATE_PATTERN: "must be a rate such as 100mbit or 2.5gbit",
    TIME_PATTERN: "must be a time such as 5ms or 250us",
    OPTION_PATTERN: "must be an option in its long form, such as --time=1:00:00",
    PAGE_PATTERN: "must be a file whose name ends in .html",
    DEVICE_PATTERN: "must be cpu, cuda or one of its devices, such as cuda:1",
}

STRICT: ConfigDict = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
"""The value of a record's `__pydantic_config__` that makes pydantic strict."""

_ORDER: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "gt": ("above", operator.gt),
    "ge": ("at least", operator.ge),
    "lt": ("below", operator.lt),
    "le": ("at most", operator.le),
}
_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """Bounds of a value, as metadata of an `Annotated` type; None is no bound.

    Attributes:
        ge: at least this; `gt`: more than this; `le`: at most this; `lt`: less than this.
        pattern: regular expression found in the text.
        min_length: characters of the text.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    pattern: str | None = None
    min_length: int | None = None

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Pydantic's hook for metadata: the schema of the type with these bounds."""
        bounds = {name: getattr(self, name) for name in self.__slots__}
        return handler(source) | {name: b for name, b in bounds.items() if b is not None}

    def holds(self, value: Any) -> bool:
        """Whether a number is in its range, a text of its form, a text or list long enough."""
        if self.pattern is not None and re.search(self.pattern, value) is None:
            return False
        if self.min_length is not None and len(value) < self.min_length:
            return False
        return all(is_met(value, bound) for _, is_met, bound in self._limits())

    def described(self, kind: str) -> Iterator[str]:
        """The bounds of a value in words, beginning with its kind."""
        if self.pattern is not None:
            yield PATTERNS[self.pattern].removeprefix("must be ")
        elif self.min_length is not None:
            yield f"{kind} that is not empty"
        else:
            limits = (f"{word} {_digits(bound)}" for word, _, bound in self._limits())
            yield f"{kind} {' and '.join(limits)}"

    def _limits(self) -> Iterator[tuple[str, Callable[[Any, Any], bool], float]]:
        for name, (word, is_met) in _ORDER.items():
            if (bound := getattr(self, name)) is not None:
                yield word, is_met, bound


@dataclass(frozen=True, slots=True)
class OneOf:
    """A choice among names that are registered at run time, as metadata of an `Annotated` type."""

    names: Callable[[], Iterable[str]]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: Callable[[Any], dict[str, Any]]
    ) -> dict[str, Any]:
        """Pydantic's hook for metadata: the schema of a literal."""
        return {"type": "literal", "expected": [*self.names()]}

    def holds(self, value: Any) -> bool:
        """Whether a text is one of the names."""
        return value in self.names()

    def described(self, kind: str) -> Iterator[str]:
        """The names that are allowed, in quotes."""
        yield from map(repr, self.names())


def _digits(bound: float) -> str:
    """A bound as people read it."""
    if isinstance(bound, int):
        is_power = bound > 2**32 and bound.bit_count() == 1
        return f"2^{bound.bit_length() - 1}" if is_power else f"{bound:,}"
    return f"{bound:g}"


Count = Annotated[int, Bound(ge=0, lt=2**63)]
Positive = Annotated[int, Bound(ge=1, lt=2**63)]
Seed = Annotated[int, Bound(ge=0, lt=2**63)]
Several = Annotated[int, Bound(ge=1, le=1024)]
Lag = Annotated[int, Bound(ge=0, le=1024)]
# The range of float32, and a limit for factors whose product must stay in it.
LARGEST, SMALLEST, MOST_FACTOR = (2 - 2.0**-23) * 2.0**127, 2.0**-126, 1e18
Rate = Annotated[float, Bound(gt=0, le=LARGEST)]
Epsilon = Annotated[float, Bound(ge=SMALLEST, le=LARGEST)]
LearningRate = Annotated[float, Bound(gt=0, le=MOST_FACTOR)]
Decay = Annotated[float, Bound(ge=0, le=MOST_FACTOR)]
Seconds = Annotated[float, Bound(gt=0, le=1e6)]
Fraction = Annotated[float, Bound(ge=0, le=1)]
Part = Annotated[float, Bound(gt=0, le=1)]
BelowOne = Annotated[float, Bound(ge=0, lt=1)]
BetweenZeroAndOne = Annotated[float, Bound(gt=0, lt=1)]
LevelBits = Annotated[int, Bound(ge=3, le=8)]
WirePrecision = Literal["float32", "bfloat16", "float16"]
Monitor = Literal["log_loss", "auc", "gauc"]
Extra = Literal["error", "ignore"]
PrecisionOrLevels = Literal["float32", "bfloat16", "float16", "levels"]
Name = Annotated[str, Bound(pattern=NAME_PATTERN)]
LinkRate = Annotated[str, Bound(pattern=RATE_PATTERN)]
Latency = Annotated[str, Bound(pattern=TIME_PATTERN)]
Path = Annotated[str, Bound(min_length=1)]
Paths = Path | Annotated[tuple[Path, ...], Bound(min_length=1)]


@cache
def types_of(record: type) -> Mapping[str, Any]:
    """The types of a dataclass's fields by name, with the metadata of `Annotated`."""
    hints = get_type_hints(record, include_extras=True)
    return {field.name: hints[field.name] for field in fields(record)}


class SettingsError(ValueError):
    """Invalid values of a record's fields.

    Args:
        faults: field, value and reason of each invalid value.

    Attributes:
        faults: as given.
    """

    def __init__(self, record: type, faults: Sequence[tuple[str, object, str]]) -> None:
        lines = (f"{name} = {value!r}: {reason}" for name, value, reason in faults)
        super().__init__(f"{record.__name__}: {'; '.join(lines)}")
        self.faults = faults


def check(record: Any) -> None:
    """Check all values of a frozen record, and convert numpy's numbers in it to Python's.

    Args:
        record: a dataclass instance; changed where it holds numpy's numbers.

    Raises:
        SettingsError: a value is not of its field's type or is out of bounds.
    """
    faults: list[tuple[str, object, str]] = []
    for name, kind in types_of(record.__class__).items():
        value = _plain(getattr(record, name))
        object.__setattr__(record, name, value)
        if not fits(value, kind):
            faults.append((name, value, f"must be {' or '.join(described(kind))}"))
    if faults:
        raise SettingsError(record.__class__, faults)


def _plain(value: object) -> object:
    """Convert numbers of other types, such as numpy's, so that `==` and `repr` are Python's."""
    if type(value) is tuple:
        return tuple(map(_plain, cast("tuple[object, ...]", value)))
    if isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    return float(value) if isinstance(value, Real) else value


def fits(value: object, kind: Any) -> bool:
    """Whether a value is of a type, and within the bounds of its annotations."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(fits(value, part) for part in parts)
    if origin is Literal:
        return type(value) is str and value in parts
    if origin is Annotated:
        return fits(value, parts[0]) and all(bound.holds(value) for bound in parts[1:])
    if origin is tuple:
        items = cast("Sequence[object]", value)
        right = type(value) is tuple and (parts[-1] is ... or len(items) == len(parts))
        return right and all(fits(item, parts[0]) for item in items)
    if kind is float:
        largest = sys.float_info.max  # an int may be larger than any float
        return type(value) in (int, float) and -largest <= cast("float", value) <= largest
    return type(value) is kind if kind in _WORDS or kind is NoneType else isinstance(value, kind)


def described(kind: Any) -> Iterator[str]:
    """The alternatives of a type, in words."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        for part in parts:
            yield from described(part)
    elif origin is Literal:
        yield from map(repr, parts)
    elif origin is Annotated:
        yield from parts[1].described(_WORDS.get(parts[0], "a tuple"))
    elif origin is tuple:
        several = "a tuple" if parts[-1] is ... else f"a tuple of {len(parts)}"
        yield f"{several}, each {' or '.join(described(parts[0]))}"
    else:
        yield "None" if kind is NoneType else _WORDS[kind]
