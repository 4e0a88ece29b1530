"""From plain values to a `Config`: every fault of type, range and combination at once."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from dlrm_hybrid.bounds import PATTERNS
from dlrm_hybrid.config.identity import flat, is_below
from dlrm_hybrid.config.keys import unknown_key
from dlrm_hybrid.config.rules import RULES
from dlrm_hybrid.config.schedule import shown
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.types import ConfigError, DataError, printable

# Messages of pydantic's that speak of JSON, not of what is typed.
PYDANTIC = {
    "Input should be a valid array": "must be a list such as [a,b]",
    "Input should be a valid integer": "must be an integer",
    "Input should be a valid number": "must be a number",
    "Input should be a valid string": "must be text",
    "Input should be a valid boolean": "must be true or false",
}
_MUST = re.compile(r"^\w+ should")
MOST_CHARACTERS = 500  # of the line for one fault


def validate(values: Mapping[str, Any]) -> Config:
    """Make the typed configuration of plain values, or name all their faults.

    Raises:
        ConfigError: one line per fault, each naming its key and the value it has.
    """
    if faults := all_faults(values):
        raise ConfigError(faults_text(faults))
    return _typed(values)


def plain_values(config: Config) -> dict[str, Any]:
    """The plain values of a configuration, of which `validate` makes it again."""
    return adapter().dump_python(config, mode="json", by_alias=True)


def all_faults(
    values: Mapping[str, Any],
    defaults: Callable[[], Mapping[str, Any]] | None = None,
    wrong: Sequence[str] = (),
) -> list[str]:
    """Every fault of type, range and combination, one line each.

    Rules between keys want keys that are right alone. So where some are not, these get the values
    of `defaults`, and what rules say of them is left out.

    Args:
        values: of all keys.
        defaults: makes values that are right; without it the rules wait until all keys are right.
        wrong: keys whose values could not even be taken over into `values`.
    """
    faults: list[str] = []
    try:
        config = _typed(values)
    except ValidationError as error:
        faults = list(_lines(error, values))
        if defaults is None:
            return faults
        wrong = [*wrong, *_wrong_keys(error, values)]
        try:
            config = _typed(_repaired(values, defaults(), wrong))
        except ValidationError:
            return faults
    found = (fault for rule in RULES for fault in rule(config))
    return [*faults, *(fault for fault in found if not any(_names(fault, key) for key in wrong))]


def sound(
    values: Mapping[str, Any], defaults: Callable[[], Mapping[str, Any]]
) -> Mapping[str, Any]:
    """The values, with those of `defaults` where one is wrong by itself."""
    try:
        _typed(values)
    except ValidationError as error:
        return _repaired(values, defaults(), _wrong_keys(error, values))
    return values


def _wrong_keys(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """The keys whose values pydantic has refused."""
    known = list(flat(values))
    bad = (_key([str(part) for part in one["loc"]], known) for one in error.errors())
    return [key.partition("[")[0] for key in bad]


def _typed(values: Mapping[str, Any]) -> Config:
    # By way of JSON: there a list is a tuple and a mapping a section, in strict mode too.
    return adapter().validate_json(json.dumps(values))


@functools.cache
def adapter() -> TypeAdapter[Config]:
    """Reads configurations; takes longer to make than to use."""
    return TypeAdapter(Config)


def _repaired(
    values: Mapping[str, Any], defaults: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    """`values` with those of `defaults` at some keys, and without those that it does not have."""
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
    """The configuration in a file of a run or checkpoint.

    Args:
        path: of the file, for messages.
        values: what it says.

    Raises:
        DataError: that is no configuration of this version; names the keys.
    """
    try:
        validate(values)
    except ConfigError as error:
        raise DataError(f"{path}: config: {error}") from None
    return values


def unset_faults(section: str, options: object, wanted: Mapping[str, str]) -> list[str]:
    """A fault for each key of a section that is null and must not be.

    Args:
        section: its name.
        options: it.
        wanted: what to do, by key.
    """
    missing = (name for name in wanted if getattr(options, name) is None)
    return [f"{section}.{name} = null: {wanted[name]}" for name in missing]


def faults_text(faults: Sequence[str]) -> str:
    """The faults of one configuration as one message, each on its own line."""
    unique = list(dict.fromkeys(one_line(fault) for fault in faults))
    head = "1 fault" if len(unique) == 1 else f"{len(unique)} faults"
    return f"configuration: {head}\n" + "\n".join(f"  {fault}" for fault in unique)


def one_line(fault: str) -> str:
    """A fault as one printable line: what was typed may hold anything."""
    text = printable(fault).replace("\n", "\\n")
    return text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}…"


def _lines(error: ValidationError, values: Mapping[str, Any]) -> Iterator[str]:
    """The faults of pydantic in our words, one line per key: `train.batch_size = 0: must be …`."""
    known = list(flat(values))
    messages: dict[str, list[str]] = {}
    found = error.errors(include_url=False)
    keys = [_key([str(part) for part in fault["loc"]], known) for fault in found]
    for fault, key in zip(found, keys, strict=True):
        # A list with a wrong item is also too short without it, and no number.
        if isinstance(fault["input"], list) and any(one.startswith(f"{key}[") for one in keys):
            continue
        if fault["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
            yield unknown_key(key)
        elif fault["type"] in ("missing", "missing_argument"):
            yield f"{'.'.join(str(part) for part in fault['loc'])}: missing"
        else:
            message = _wanted(fault["msg"], fault.get("ctx", {}))
            messages.setdefault(f"{key} = {shown(fault['input'])}", []).append(message)
    for head, several in messages.items():
        yield f"{head}: {', or '.join(several)}"


def _wanted(said: str, context: Mapping[str, Any]) -> str:
    """What a value must be, from what pydantic says: it writes 1e-38 with all its zeros."""
    message = PATTERNS.get(context.get("pattern", "")) or PYDANTIC.get(said)
    bounds = [one for key in ("ge", "gt", "le", "lt") if isinstance(one := context.get(key), float)]
    shorter = f"{said.rpartition(' ')[0]} {bounds[0]:g}" if bounds else said
    return message or _MUST.sub("must", shorter)


def _key(path: list[str], known: Sequence[str]) -> str:
    """The longest head of pydantic's path that is a key; it goes on with tried types of a union."""
    for length in range(len(path), 0, -1):
        key = ".".join(path[:length])
        if any(is_below(name, (key,)) for name in known):
            return key + "".join(f"[{part}]" for part in path[length:] if part.isdigit())
    return ".".join(path)
