"""Aggregate profile of a Criteo data set, from which `data=synthetic` draws its rows.

A profile holds shares and counts only, no category value and no row. Every number that decides a
byte of the generated rows is an integer; weights are parts of 2**32.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Final, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dlrm_hybrid.data.manifest import odd_field
from dlrm_hybrid.types import DataError

NUM_DENSE, NUM_CATEGORICAL = 13, 26  # of Criteo's rows
FORMAT: Final = 1
GENERATOR = 1  # increase it whenever a change gives other rows for the same profile
WEIGHT_ONE = 1 << 32
LOGISTIC_STEPS_PER_UNIT = 64
_NOTHING_ELSE = ConfigDict(extra="forbid")


@dataclass(frozen=True, slots=True, kw_only=True)
class Staircase:
    """The distribution of one column's present values, as steps with a flat top.

    Attributes:
        missing: weight of an empty field.
        missing_with: column (0 … 38, integers first) whose draw decides whether the field is empty;
            columns that name the same one are empty together.
        starts: first value (integers) or first rank (categoricals, 0 is the most frequent) of each
            step, strictly increasing; the values of a step are equally likely.
        stop: one past the last value of the last step.
        weights: weight of each step, together 2**32.
    """

    __pydantic_config__: ClassVar = _NOTHING_ELSE

    missing: int
    missing_with: int
    starts: tuple[int, ...]
    stop: int
    weights: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The planted model that draws the labels; its effects are hashes of (salt, column, rank).

    Attributes:
        salt: 64-bit key of all effects.
        head_ranks: ranks from this one on share one effect and have no interaction.
        pairs: categorical columns (0 … 25) whose latent vectors are multiplied.
        bias: added to the logit, in 2**-20.
        dense_gain: added to the logit per unit of an integer column's raw effect, in 2**-20.
        categorical_gain: the same for a raw categorical effect.
        interaction_gain: the same for a raw dot product.
        logistic: weight of a click for logits from -8 to 8 in steps of 1/64.
    """

    __pydantic_config__: ClassVar = _NOTHING_ELSE

    salt: int
    head_ranks: int
    pairs: tuple[tuple[int, int], ...]
    bias: int
    dense_gain: int
    categorical_gain: int
    interaction_gain: int
    logistic: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Distributions of all columns and the teacher that synthetic rows are drawn from.

    Attributes:
        provenance: which rows were measured and how; for the reader.
        click_rate: share of rows with label 1.
        cardinalities: number of categories of each categorical column; a missing value is one, as
            in facebookresearch/dlrm.
        integers: columns I1 … I13.
        categoricals: columns C1 … C26.
        teacher: how labels are drawn.
    """

    __pydantic_config__: ClassVar = _NOTHING_ELSE

    format: Literal[1]
    provenance: Mapping[str, Any]
    click_rate: float
    cardinalities: tuple[int, ...]
    integers: tuple[Staircase, ...]
    categoricals: tuple[Staircase, ...]
    teacher: Teacher

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that change with any number of the profile."""
        return hashlib.blake2b(dumps(self).encode(), digest_size=4).hexdigest()


def dumps(profile: Profile) -> str:
    """Write a profile as JSON: one line per column, keys in the order of the classes."""
    lines: list[str] = []
    for key, value in asdict(profile).items():
        columns = ",\n  ".join(map(_line, value)) if key in ("integers", "categoricals") else ""
        lines.append(f'"{key}": ' + (f"[\n  {columns}\n ]" if columns else _line(value)))
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def loads(text: str, name: str) -> Profile:
    """Read a profile from JSON; DataError after `name` if it is none, or a column is invalid."""
    try:
        profile = TypeAdapter(Profile).validate_json(text, strict=True)
    except ValidationError as error:
        raise DataError(f"{name}: not a profile of format {FORMAT}: {odd_field(error)}") from error
    _check(profile, name)
    return profile


def read(path: Path) -> Profile:
    """Read a profile file; raises DataError if it cannot be read or is not a profile."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    return loads(text, str(path))


@cache
def builtin(name: str) -> Profile:
    """Read a profile of the package, such as `criteo_kaggle`; raises DataError if there is none."""
    folder = resources.files("dlrm_hybrid.data") / "profiles"
    file = folder / f"{name}.json"
    if not file.is_file():
        names = ", ".join(sorted(entry.name.removesuffix(".json") for entry in folder.iterdir()))
        raise DataError(f"data.profile: {name!r} is not one of: {names}")
    return loads(file.read_text(encoding="utf-8"), f"{name}.json")


def _check(profile: Profile, name: str) -> None:
    if len(profile.integers) != NUM_DENSE or len(profile.categoricals) != NUM_CATEGORICAL:
        raise DataError(f"{name}: {NUM_DENSE} integer and {NUM_CATEGORICAL} categorical columns")
    for number, column in enumerate((*profile.integers, *profile.categoricals)):
        increasing = all(low < high for low, high in pairwise((*column.starts, column.stop)))
        if not increasing or len(column.starts) != len(column.weights):
            raise DataError(f"{name}: column {number}: steps are not strictly increasing")
        if sum(column.weights) != WEIGHT_ONE or min(column.weights) < 0:
            raise DataError(f"{name}: column {number}: weights must sum to {WEIGHT_ONE}")
        if not 0 <= column.missing <= WEIGHT_ONE:
            raise DataError(f"{name}: column {number}: missing must be in 0 … {WEIGHT_ONE}")
        if not 0 <= column.missing_with < NUM_DENSE + NUM_CATEGORICAL:
            raise DataError(f"{name}: column {number}: missing_with is not a column")
    if not all(0 <= column < NUM_CATEGORICAL for pair in profile.teacher.pairs for column in pair):
        raise DataError(f"{name}: teacher.pairs must name columns 0 … {NUM_CATEGORICAL - 1}")
    if len(profile.teacher.logistic) != 16 * LOGISTIC_STEPS_PER_UNIT:
        raise DataError(f"{name}: teacher.logistic needs {16 * LOGISTIC_STEPS_PER_UNIT} entries")


def raw_name(rows: int, seed: int, profile: Profile) -> str:
    """File name that identifies synthetic rows: number, seed, profile and generator."""
    return f"synthetic-{rows}-{seed}-{profile.digest}-{GENERATOR}.txt"
