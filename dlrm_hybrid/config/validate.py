"""From plain values to a `Config`: every fault of type, range and combination at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dlrm_hybrid.config.keys import with_new_keys
from dlrm_hybrid.config.reading import read
from dlrm_hybrid.config.rules import RULES
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.types import ConfigError, DataError, printable

MOST_CHARACTERS = 500  # of the line for one fault


def validate(values: Mapping[str, Any]) -> Config:
    """Make the typed configuration of plain values, or name all their faults.

    Raises:
        ConfigError: one line per fault, each naming its key and the value it has.
    """
    reading = read(values)
    config = reading.config
    faults = reading.faults or [fault for rule in RULES for fault in rule(cast("Config", config))]
    if faults or config is None:
        raise ConfigError(faults_text(faults))
    return config


def all_faults(
    values: Mapping[str, Any],
    defaults: Callable[[], Mapping[str, Any]] | None = None,
    wrong: Sequence[str] = (),
) -> list[str]:
    """Every fault of type, range and combination, one line each.

    Rules between keys need keys that are right alone. So wrong keys get the values of `defaults`,
    and rules' faults of them are left out.

    Args:
        defaults: makes values that are right; without it the rules wait until all keys are right.
        wrong: keys whose values could not even be taken over into `values`.
    """
    reading = read(values)
    faults, config = list(reading.faults), reading.config
    if config is None:
        if defaults is None:
            return faults
        wrong = [*wrong, *reading.keys]
        config = read(_repaired(values, defaults(), wrong)).config
        if config is None:
            return faults
    more = (fault for rule in RULES for fault in rule(config))
    return [*faults, *(fault for fault in more if not any(_names(fault, key) for key in wrong))]


def sound(
    values: Mapping[str, Any], defaults: Callable[[], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The values, with those of `defaults` where a value is wrong by itself."""
    keys = read(values).keys
    return _repaired(values, defaults(), keys) if keys else values


def _repaired(
    values: Mapping[str, Any], defaults: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    """`values` with those of `defaults` at some keys, without those that `defaults` lacks."""
    repaired: dict[str, Any] = {}
    for name in values.keys() | defaults.keys():
        below = [key.partition(".")[2] for key in keys if key.partition(".")[0] == name]
        if not below:
            repaired[name] = values[name]
        elif name not in defaults:
            continue
        elif "" in below or not isinstance(values.get(name), Mapping):
            repaired[name] = defaults[name]
        else:
            repaired[name] = _repaired(values[name], defaults[name], below)
    return repaired


def _names(fault: str, key: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\w)", fault) is not None


def own_values(path: Path, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration in a file of a run or checkpoint, perhaps of an earlier version.

    Raises:
        DataError: it has other keys than this version; names them.
    """
    filled = with_new_keys(values)
    try:
        validate(filled)
    except ConfigError as error:
        raise DataError(f"{path}: config: {error}") from None
    return filled


def unset_faults(section: str, options: object, advice: Mapping[str, str]) -> list[str]:
    """A fault for each key of a section that is null and must not be."""
    missing = (name for name in advice if getattr(options, name) is None)
    return [f"{section}.{name} = null: {advice[name]}" for name in missing]


def faults_text(faults: Sequence[str]) -> str:
    """The faults of one configuration as one message, each on its own line."""
    unique = list(dict.fromkeys(one_line(fault) for fault in faults))
    head = "1 fault" if len(unique) == 1 else f"{len(unique)} faults"
    return f"configuration: {head}\n" + "\n".join(f"  {fault}" for fault in unique)


def one_line(fault: str) -> str:
    """A fault as one printable line: what was typed may hold anything."""
    text = printable(fault).replace("\n", "\\n")
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"
