"""From plain values to a `Config`: every fault of type, range and combination at once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from dlrm_hybrid.config.rules import RULES
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.types import ConfigError, printable

ADDED_LATER = {"minutes": 0.0}  # to `checkpoint`; runs before it saved by steps alone
NOT_PREPARED: Mapping[str, Any] = {"check": False, "overwrite": False}
MOST_CHARACTERS = 500  # of the line for one fault


def validate(values: Mapping[str, Any]) -> Config:
    """The typed configuration.

    Raises:
        ConfigError: one line per fault, each naming its key and the value it has.
    """
    try:
        # By way of JSON: there a list is a tuple and a mapping a section, and strict stays strict.
        config = TypeAdapter(Config).validate_json(json.dumps(values))
    except ValidationError as error:
        raise ConfigError(faults_text(list(_lines(error, values)))) from None
    faults = [fault for rule in RULES for fault in rule(config)]
    if faults:
        raise ConfigError(faults_text(faults))
    return config


def saved_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a checkpoint with the keys that it may be older than."""
    values = {"prepare": NOT_PREPARED, **values}
    section: Any = values.get("checkpoint")
    if not isinstance(section, dict):
        return values
    return {**values, "checkpoint": {**ADDED_LATER, **cast("dict[str, Any]", section)}}


def faults_text(faults: Sequence[str]) -> str:
    """The faults of one configuration as one message, each on its own line."""
    unique = list(dict.fromkeys(_line(fault) for fault in faults))
    head = "1 fault" if len(unique) == 1 else f"{len(unique)} faults"
    return f"configuration: {head}\n" + "\n".join(f"  {fault}" for fault in unique)


def _line(fault: str) -> str:
    """A fault as one printable line: what somebody has typed may hold anything."""
    text = printable(fault).replace("\n", "\\n")
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def unknown_key(key: str, known: Sequence[str]) -> str:
    """The message for a key that does not exist, with the nearest ones that do."""
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if not near:
        leaves = {name.rpartition(".")[2] for name in known}
        alike = difflib.get_close_matches(key.rpartition(".")[2], leaves, n=1, cutoff=0.75)
        near = [name for name in known if name.rpartition(".")[2] in alike]
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    return f"{key}: no such key{hint}"


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all leaves."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(cast("Mapping[str, Any]", value), f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def _lines(error: ValidationError, values: Mapping[str, Any]) -> Iterator[str]:
    """The faults of pydantic in our words, one line per key: `train.batch_size = 0: must be …`."""
    known = list(flatten(values))
    shown: dict[str, list[str]] = {}
    for fault in error.errors(include_url=False):
        key = _key([str(part) for part in fault["loc"]], known)
        if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            yield unknown_key(key, [name for name in known if name != key])
        elif fault["type"] in ("missing", "missing_argument"):
            yield f"{'.'.join(str(part) for part in fault['loc'])}: missing"
        else:
            message = fault["msg"].replace("Input should", "must")
            shown.setdefault(f"{key} = {_shown(fault['input'])}", []).append(message)
    for head, messages in shown.items():
        yield f"{head}: {', or '.join(messages)}"


def _key(path: list[str], known: Sequence[str]) -> str:
    """The longest head of pydantic's path that is a key; it goes on with tried types of a union."""
    for length in range(len(path), 0, -1):
        key = ".".join(path[:length])
        if any(name == key or name.startswith(f"{key}.") for name in known):
            return ".".join(path[:length]) + "".join(
                f"[{part}]" for part in path[length:] if part.isdigit()
            )
    return ".".join(path)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    return repr(value) if isinstance(value, str) else str(value)
