"""Ranges that configuration keys share.

Pydantic checks them, but is not imported: the compressors have settings too, and need no pydantic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

if TYPE_CHECKING:
    from pydantic import ConfigDict

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
PAGE_PATTERN = r"[^/]\.html$"
OPTION_PATTERN = r"^--[a-z][a-z-]*(=[^\n]*)?$"
# What a text must be, for messages.
PATTERNS = {
    NAME_PATTERN: "must be letters, digits and . _ - only, and begin with a letter or digit",
    OPTION_PATTERN: "must be an option in its long form, such as --time=1:00:00",
    PAGE_PATTERN: "must be a file whose name ends in .html",
}

STRICT: ConfigDict = {"strict": True, "extra": "forbid", "allow_inf_nan": False}
"""How pydantic checks a record: the value of its attribute `__pydantic_config__`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What a value must be, in an `Annotated` type; None where it may be anything.

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
        """What pydantic asks of metadata: the schema of the type with these bounds."""
        bounds = {name: getattr(self, name) for name in self.__slots__}
        return handler(source) | {name: one for name, one in bounds.items() if one is not None}


Count = Annotated[int, Bound(ge=0, lt=2**63)]
Positive = Annotated[int, Bound(ge=1, lt=2**63)]
Seed = Annotated[int, Bound(ge=0, lt=2**63)]
# What float32 holds, and of factors that are multiplied by each other the product.
LARGEST, SMALLEST, MOST_FACTOR = (2 - 2.0**-23) * 2.0**127, 2.0**-126, 1e18
Rate = Annotated[float, Bound(gt=0, le=LARGEST)]
Epsilon = Annotated[float, Bound(ge=SMALLEST, le=LARGEST)]
LearningRate = Annotated[float, Bound(gt=0, le=MOST_FACTOR)]
Decay = Annotated[float, Bound(ge=0, le=MOST_FACTOR)]
Seconds = Annotated[float, Bound(gt=0, le=1e6)]
Fraction = Annotated[float, Bound(ge=0, le=1)]
Part = Annotated[float, Bound(gt=0, le=1)]
BelowOne = Annotated[float, Bound(ge=0, lt=1)]
LevelBits = Annotated[int, Bound(ge=3, le=8)]
Precision = Literal["float32", "bfloat16", "float16"]
PrecisionOrLevels = Literal["float32", "bfloat16", "float16", "levels"]
Name = Annotated[str, Bound(pattern=NAME_PATTERN)]
Path = Annotated[str, Bound(min_length=1)]
