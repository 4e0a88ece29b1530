"""From plain values to a `Config`: every fault of type, range and combination at once.

Values are read first, with a fault for each key that is wrong by itself; then rules between keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from dlrm_hybrid.bounds import SettingsError, described, fits, types_of
from dlrm_hybrid.config import outside
from dlrm_hybrid.config.keys import (
    did_you_mean,
    no_such_choice,
    readers_of,
    record_in,
    records,
    shown,
    unknown_key,
    with_new_keys,
)
from dlrm_hybrid.config.rules import RULES
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.types import ConfigError, DataError, printable


@dataclass(slots=True)
class Reading:
    """The outcome of reading values.

    Attributes:
        config: the values as records; None where there is a fault.
        faults: a line for each key that is wrong by itself.
        keys: these keys.
    """

    config: Config | None = None
    faults: list[str] = field(default_factory=list[str])
    keys: list[str] = field(default_factory=list[str])

    def refuse(self, key: str, line: str) -> None:
        """Note a fault."""
        self.faults.append(line)
        self.keys.append(key)


def read(values: Mapping[str, Any]) -> Reading:
    """Read a configuration, whatever it holds, without regard to what keys mean together."""
    reading = Reading()
    config = _record(Config, values, "", reading)
    reading.config = None if reading.faults else config
    return reading


def _record(record: Any, values: Mapping[str, Any], prefix: str, reading: Reading) -> Any:
    kinds = {name.rstrip("_"): kind for name, kind in types_of(record).items()}
    read: dict[str, Any] = {}
    before = len(reading.faults)
    for name, kind in kinds.items():
        key = f"{prefix}{name}"
        if name in values:
            read[name] = _value(kind, values[name], key, reading)
        elif record_in(kind) is None or NoneType not in get_args(kind):
            reading.refuse(key, f"{key}: missing")
    for name, value in values.items():
        if name not in kinds:
            reading.refuse(f"{prefix}{name}", _unknown(record, f"{prefix}{name}", value))
    if len(reading.faults) > before:
        return None
    try:
        return record(**{name if name != "import" else "import_": read[name] for name in read})
    except SettingsError as error:
        for name, value, reason in error.faults:
            key = f"{prefix}{name}"
            reading.refuse(key, f"{key} = {shown(value)}: {_of_yaml(reason)}")
    return None


def _unknown(record: Any, key: str, value: Any) -> str:
    readers = readers_of(key)
    if readers is None:
        return unknown_key(key)
    choice = f"{key.partition('.')[0]}={record.name}"
    return f"{key} = {shown(value)}: has no effect with {choice}; only applies to {readers}"


def _value(kind: Any, value: Any, key: str, reading: Reading) -> Any:
    record = record_in(kind)
    if record is None:
        return _plain_value(kind, value, key, reading)
    if value is None and record is not kind:
        return None
    if not isinstance(value, Mapping):
        reading.refuse(key, f"{key} = {shown(value)}: must be keys with values")
        return None
    values = cast("Mapping[str, Any]", value)
    if "." in key:
        return _record(record, values, f"{key}.", reading)
    alone = records(key).get("")
    if alone is not None and ":" not in str(values.get("name")):
        return _record(alone, values, f"{key}.", reading)
    return _choice(key, values, reading)


def _choice(section: str, values: Mapping[str, Any], reading: Reading) -> Any:
    settings = {**values}
    name = settings.pop("name", None)
    record: Any = records(section).get(str(name)) or outside.record_of(section, str(name))
    if record is None:
        record = outside.as_data(section, str(name), settings)
    if record is None:
        fault = no_such_choice(section, [name], [*records(section)])
        reading.refuse(f"{section}.name", f"{section}.name = {shown(name)}: {fault}")
        return None
    return _record(record, settings, f"{section}.", reading) if isinstance(record, type) else record


def _plain_value(kind: Any, value: Any, key: str, reading: Reading) -> Any:
    """A value that is no section, as the type of its field."""
    read_value = _tuples(value)
    if fits(read_value, kind):
        return _number(read_value, kind)
    items = cast("tuple[Any, ...]", read_value) if isinstance(read_value, tuple) else ()
    bad = _bad_items(kind, items)
    for position, item, item_kind in bad:
        reading.refuse(key, f"{key}[{position}] = {shown(item)}: {_must(item_kind)}")
    if not bad:
        meant = [f"{key}=[{value}]"] if fits((value,), kind) else []
        reading.refuse(key, f"{key} = {shown(read_value)}: {_must(kind)}{did_you_mean(meant)}")
    return None


def _bad_items(kind: Any, items: Sequence[Any]) -> list[tuple[int, Any, Any]]:
    """Position, value and type of the items of a list that do not fit."""
    for part in _parts(kind):
        if get_origin(part) is tuple and (
            get_args(part)[-1] is ... or len(get_args(part)) == len(items)
        ):
            item = get_args(part)[0]
            return [(place, each, item) for place, each in enumerate(items) if not fits(each, item)]
    return []


def _parts(kind: Any) -> list[Any]:
    """The types of a union, without their bounds."""
    if get_origin(kind) in (Union, UnionType):
        return [part for arg in get_args(kind) for part in _parts(arg)]
    return _parts(get_args(kind)[0]) if get_origin(kind) is Annotated else [kind]


def _number(value: Any, kind: Any) -> Any:
    """The value, a whole number as float where a float is asked for."""
    if isinstance(value, tuple):
        items = [get_args(part)[0] for part in _parts(kind) if get_origin(part) is tuple]
        return tuple(_number(item, items[0]) for item in cast("tuple[Any, ...]", value))
    is_float = type(value) is int and int not in _parts(kind) and float in _parts(kind)
    return float(value) if is_float else value


def _must(kind: Any) -> str:
    return _of_yaml(f"must be {' or '.join(described(kind))}")


def _of_yaml(reason: str) -> str:
    words = {"None": "null", "a tuple": "a list"}
    for word, ours in words.items():
        reason = reason.replace(word, ours)
    return reason


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in cast("Sequence[Any]", value))
    return value


NAME_CHECKPOINT = "name a run folder or one of its checkpoints"
MOST_CHARACTERS = 500  # of the line for one fault


def validate(values: Mapping[str, Any]) -> Config:
    """Make the typed configuration of plain values; ConfigError with a line for each fault."""
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
