"""From plain values to a `Config`: every fault of type, range and combination at once."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.types import ConfigError

NUM_DENSE = 13

Rule = Callable[[Config], Iterator[str]]


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


def faults_text(faults: Sequence[str]) -> str:
    """The faults of one configuration as one message, each on its own line."""
    unique = list(dict.fromkeys(faults))
    head = "1 fault" if len(unique) == 1 else f"{len(unique)} faults"
    return f"configuration: {head}\n" + "\n".join(f"  {fault}" for fault in unique)


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


def raw_files(config: Config) -> tuple[str, ...]:
    """`data.raw` as a list, whether one file or several were given."""
    raw = config.data.raw
    if raw is None:
        return ()
    return (raw,) if isinstance(raw, str) else raw


def _data(config: Config) -> Iterator[str]:
    data = config.data
    if data.name == "synthetic":
        for key in ("rows", "seed"):
            if getattr(data, key) is None:
                yield f"data.{key} = null: data=synthetic needs a number"
        if data.raw is not None:
            yield f"data.raw = {data.raw!r}: data=synthetic makes its own; use data=criteo_kaggle"
    else:
        for key in ("rows", "seed"):
            if getattr(data, key) is not None:
                yield f"data.{key} = {getattr(data, key)}: belongs to data=synthetic"
        if data.prepared is None:
            yield "data.prepared = null: data=criteo_kaggle needs a folder"
    files = len(raw_files(config))
    if data.day_split == "files" and files != data.days:
        yield (
            f"data.day_split = 'files': data.raw must list data.days = {data.days} files, "
            f"it lists {files}"
        )


def _model(config: Config) -> Iterator[str]:
    model = config.model
    if model.bottom[0] != NUM_DENSE:
        yield f"model.bottom[0] = {model.bottom[0]}: must be {NUM_DENSE}, the integer features"
    if model.bottom[-1] != model.embedding_dim:
        yield (
            f"model.bottom[{len(model.bottom) - 1}] = {model.bottom[-1]}: must equal "
            f"model.embedding_dim = {model.embedding_dim}, they meet in the dot interaction"
        )
    if model.top[-1] != 1:
        yield f"model.top[{len(model.top) - 1}] = {model.top[-1]}: must be 1, the logit"


def _optimizer(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    for key, owner in (("momentum", "momentum"), ("eps", "adagrad")):
        value = getattr(optimizer, key)
        if optimizer.name == owner and value is None:
            yield f"optimizer.{key} = null: optimizer={owner} needs a number"
        if optimizer.name != owner and value is not None:
            yield f"optimizer.{key} = {value}: belongs to optimizer={owner}"
    if optimizer.schedule == "warmup_decay":
        if optimizer.decay_steps and optimizer.decay_start_step < optimizer.warmup_steps:
            yield (
                f"optimizer.decay_start_step = {optimizer.decay_start_step}: must not be less "
                f"than optimizer.warmup_steps = {optimizer.warmup_steps}"
            )
        return
    for key in ("warmup_steps", "decay_start_step", "decay_steps"):
        if getattr(optimizer, key):
            yield (
                f"optimizer.{key} = {getattr(optimizer, key)}: "
                f"belongs to optimizer.schedule=warmup_decay, not {optimizer.schedule}"
            )


RULES: tuple[Rule, ...] = (_data, _model, _optimizer)
