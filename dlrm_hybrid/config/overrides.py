"""Single overrides, before anything is composed: their meaning and their faults.

Hydra reads configurations from folders that an override names, puts a group's keys wherever an
override says, and makes objects of what its own section names. None of that may be asked for.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, Quote, QuotedString, RangeSweep
from hydra.errors import HydraException
from omegaconf import MISSING

from dlrm_hybrid.config.identity import flat, is_below
from dlrm_hybrid.config.keys import (
    CONF,
    EXPERIMENT,
    MOST_SHOWN,
    all_groups,
    all_keys,
    no_such_choice,
    unknown_key,
)
from dlrm_hybrid.config.outside import GROUPS, fault_of
from dlrm_hybrid.disk import RUN_FOLDER_KEY, SWEEP_FOLDER_KEY

ALLOWED = (RUN_FOLDER_KEY, SWEEP_FOLDER_KEY, "hydra.sweeper.params")
MOST_JOBS = 10_000  # of a sweep
MOST_NESTED = 32  # brackets; the parser recurses
_SPARSITY = re.compile(r"(\+*gradient\.)sparsity=((?:0|0?\.\d+)(?:,(?:0|0?\.\d+))*)")
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_HYDRA = re.compile(r"[^=]*(?<![\w-])hydra(?![\w-])[^=]*")
# Errors of Python itself that come through where Hydra does not check: a group's choice that is a
# number, an integer of thousands of digits, a package without a group.
UNCHECKED = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError),
    *(TypeError, ValueError),
)


@dataclass(frozen=True, slots=True)
class Points:
    """The single overrides that an override stands for.

    Attributes:
        key: its key or group with the sign before it, e.g. `+experiment`.
        overrides: the single overrides; several if it is swept.
    """

    key: str
    overrides: tuple[str, ...]

    @property
    def is_swept(self) -> bool:
        """Whether a sweep has several points for it."""
        return len(self.overrides) != 1


def override_text(key: str, value: str | Sequence[str]) -> str:
    """The override that sets a key to this very text, or list of texts, quoted if need be.

    On a command line `shlex.quote` belongs around it: the shell reads it first.
    """
    return f"{key}={_value_text(value)}"


def with_density(overrides: Sequence[str]) -> list[str]:
    """The overrides, with `gradient.sparsity=0.9,0.99` as `gradient.density=0.1,0.01`.

    Papers have either word. Values other than decimal fractions below 1 stay as they are.
    """

    def density(typed: re.Match[str]) -> str:
        values = (f"{1 - Decimal(value)}" for value in typed[2].split(","))
        return f"{typed[1]}density={','.join(values)}"

    return [density(typed) if (typed := _SPARSITY.fullmatch(text)) else text for text in overrides]


@lru_cache(maxsize=1024)
def parsed(text: str) -> Override:
    """An override as Hydra's parser reads it; not to be changed. HydraException if it is none."""
    return OverridesParser.create().parse_override(text)


def read_override(text: str) -> tuple[str, Any]:
    """Key, or group, and value of an override that has no fault, as Hydra reads them."""
    override = parsed(text)
    return override.key_or_group, cast("Any", override.value())


def points_of(text: str, own: Sequence[str] | None = ()) -> Points:
    """An override that has no fault, taken apart."""
    override = parsed(text)
    key = override.get_key_element()
    if not override.is_sweep_override():
        return Points(key, (text,))
    return Points(key, tuple(f"{key}={value}" for value in _swept(override, own)))


def override_fault(text: str, is_sweep: bool = False, own: Sequence[str] | None = ()) -> str | None:
    """The fault of an override by itself; None without one.

    Args:
        is_sweep: whether an override may have several values.
        own: names of the user's experiments; None where they are not known.
    """
    head = text.partition("=")[0]
    match = _HYDRA.match(head)
    if match is not None and head.rstrip() not in ALLOWED:
        return f"{head}: of Hydra's own keys only {', '.join(ALLOWED)} can be set"
    depths = itertools.accumulate((sign in "[{(") - (sign in "]})") for sign in text)
    if max(depths, default=0) > MOST_NESTED:
        return f"{text[:MOST_SHOWN]}…: more than {MOST_NESTED} nested brackets"
    try:
        override = parsed(text)
        if override.package is not None or "@" in head:
            return f"{text}: the keys of a group cannot be moved with @"
        faults = _sweep(text, override, is_sweep), _group(text, override, own)
        return next((fault for fault in faults if fault), None) or _key(text, override)
    except (HydraException, *UNCHECKED):
        return f"{text}: cannot be parsed as key=value"


def _value_text(value: str | Sequence[str]) -> str:
    if not isinstance(value, str):
        # An item is read otherwise than a value alone: a backslash at its end escapes the comma.
        items = (_quoted(item) if "\\" in item else _value_text(item) for item in value)
        return f"[{','.join(items)}]"
    with suppress(HydraException, *UNCHECKED):
        if value and "${" not in value and read_override(f"_={value}")[1] == value:
            return value
    return _quoted(value)


def _quoted(value: str) -> str:
    # Inside quotes, too, ${ begins an interpolation, unless an odd number of backslashes is before.
    escaped = _INTERPOLATION.sub(r"\1\1\\${", value)
    return QuotedString(escaped, Quote.double).with_quotes()


def _swept(override: Override, own: Sequence[str] | None) -> list[str]:
    glob: Any = override.value()
    if isinstance(glob, Glob):
        return glob.filter(list(_choices(override.key_or_group, own)))
    values = itertools.islice(override.sweep_string_iterator(), MOST_JOBS + 1)
    return [value.replace("\\:", ":") for value in values]  # as it was typed


def _sweep(text: str, override: Override, is_sweep: bool) -> str | None:
    """The fault of several values where one is needed, or of more than can be listed."""
    if not override.is_sweep_override():
        return None
    head, _, value = text.partition("=")
    if not is_sweep:
        key = all_keys().get(override.key_or_group)
        if key is not None and "[" in key.kind and re.fullmatch(r"[^\[\](){}]+", value):
            return f"{text}: for a list write {head}=[{value}]; for a sweep add -m"
        return f"{text}: several values are a sweep: add -m"
    if not override.is_discrete_sweep():
        return f"{text}: a sweep needs single values: {head}=1,2,3 or range(1,4)"
    # Counted, not listed: it may have billions, and shuffled ones would all be in memory.
    swept: Any = override.value()
    most = MOST_JOBS
    if isinstance(swept, RangeSweep):
        start, stop = swept.start, swept.stop
        if start is None or stop is None or not swept.step:
            return f"{text}: a range needs start, stop and a step that is not 0"
        most = abs(stop - start) / abs(swept.step)
    return f"{text}: more than {MOST_JOBS:,} values" if most > MOST_JOBS else None


def _choices(group: str, own: Sequence[str] | None) -> tuple[str, ...]:
    return (*all_groups().get(group, ()), *((own or ()) if group == EXPERIMENT else ()))


def _group(text: str, override: Override, own: Sequence[str] | None) -> str | None:
    """The fault of a choice that does not exist: not listed in conf/, whatever its name is."""
    group = override.key_or_group
    if group not in all_groups() or override.is_delete():
        return None
    value: Any = override.value()
    if isinstance(value, dict):
        return None  # values for keys of the section
    choices = _choices(group, own)
    chosen: Any = _swept(override, own) if override.is_sweep_override() else value
    names = cast("list[Any]", chosen) if isinstance(chosen, list) else [chosen]
    is_checked = own is not None or group != EXPERIMENT
    unknown = [name for name in names if name not in choices] if is_checked else []
    outside = [name for name in unknown if group in GROUPS and ":" in str(name)]
    if outside:
        return f"{text}: {fault_of(group, outside[0])}"
    if not names or unknown:
        return f"{text}: {no_such_choice(group, unknown, choices)}"
    if (group == EXPERIMENT) != override.is_add():
        sign = "+" if group == EXPERIMENT else ""
        return f"{text}: write {sign}{text.lstrip('+')}"
    return None


def _key(text: str, override: Override) -> str | None:
    """The fault of a key that does not exist, is a section, or names a choice without its keys."""
    name, (_, sign, value) = override.key_or_group, text.partition("=")
    new_value: Any = None if override.is_delete() else override.value()
    if name in ALLOWED:
        return None if override.is_sweep_override() else _hydra(name, new_value, value.strip())
    if isinstance(new_value, dict):
        inside = (f"{name}.{key}" for key in flat(cast("dict[str, Any]", new_value)))
        if unknown := next((key for key in inside if not _exists(key)), None):
            return unknown_key(unknown)
    if name in all_groups():
        return None
    group, _, leaf = name.rpartition(".")
    if leaf == "name" and group in all_groups() and not override.is_delete():
        return f"{text}: sets only the name; {group}={value} selects the choice with all its keys"
    below = [key for key in all_keys() if key.startswith(f"{name}.")]
    if not below and not _exists(name):
        return unknown_key(name, f"{sign}{value}")
    if override.is_delete():
        return None
    if below and not isinstance(new_value, dict | None):
        return f"{text}: {name} is a section; its keys: {', '.join(below)}"
    # The folder of experiments is looked for before Hydra reads anything.
    is_added = override.is_add() or (name == CONF and override.is_force_add())
    return f"{text}: write {text.lstrip('+')}" if is_added else None


def _exists(name: str) -> bool:
    return is_below(name, tuple(all_keys()))


def _hydra(name: str, value: Any, typed: str) -> str | None:
    if name.endswith(".dir"):
        if value == MISSING:  # to OmegaConf, quoted or not
            return f"{name} = {value}: is read as a missing value; write {name}=./{value}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            advice = f"is read as a number; write {name}=./{typed}"
            return None if str(value) == typed else f"{name} = {value}: {advice}"
        return None if isinstance(value, str) and value else f"{name} = {value}: must be a path"
    if value is None or isinstance(value, dict):
        return None
    return f"{name} = {value}: must be null or {{key: values, …}}"
