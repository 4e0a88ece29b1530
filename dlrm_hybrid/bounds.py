"""Ranges that configuration keys share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_.-]*$"
PAGE_PATTERN = r"[^/]\.html$"
# What a text must be, for messages.
PATTERNS = {
    NAME_PATTERN: "must be letters, digits and . _ - only, and begin with a letter or digit",
    PAGE_PATTERN: "must be a file whose name ends in .html",
}

STRICT = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
Rate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Part = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
LevelBits = Annotated[int, Field(ge=3, le=8)]
Precision = Literal["float32", "bfloat16", "float16"]
PrecisionOrLevels = Literal["float32", "bfloat16", "float16", "levels"]
Name = Annotated[str, Field(pattern=NAME_PATTERN)]
Path = Annotated[str, Field(min_length=1)]
