"""From plain values to records: a fault for each key that is wrong by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin

from dlrm_hybrid.bounds import SettingsError, described, fits, types_of
from dlrm_hybrid.config import outside
from dlrm_hybrid.config.keys import (
    no_such_choice,
    readers_of,
    record_in,
    records,
    shown,
    unknown_key,
)
from dlrm_hybrid.config.schema import Config


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
        elif not _is_left_out(kind):
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
        reading.refuse(key, f"{key} = {shown(read_value)}: {_must(kind)}")
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


def _is_left_out(kind: Any) -> bool:
    """Whether a type is that of a section that need not be there."""
    return record_in(kind) is not None and NoneType in get_args(kind)


def _tuples(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_tuples(item) for item in cast("Sequence[Any]", value))
    return value
