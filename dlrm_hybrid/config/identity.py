"""The keys that make two runs the same run: those that decide a weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from dlrm_hybrid.config.keys import effect_of, sections, shown
from dlrm_hybrid.record import Choice, Effect, plain
from dlrm_hybrid.types import Group

CONFIG_FILE = "config.json"  # the configuration of a run, in its folder

# Values of checkpoint.resume that begin with no other run's weights.
FROM_ITSELF = ("never", "auto")
FREE = Effect.NOTHING | Effect.FREE
MODEL = frozenset({Group.DENSE, Group.EMBEDDINGS, Group.STATISTICS})
CHANGEABLE = Effect.NEW_RUN | Effect.STATE
IN_A_NEW_RUN = "; another hydra.run.dir with checkpoint.resume=THIS_RUN takes it"


def flat(values: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested sections by dotted key."""
    result: dict[str, Any] = {}
    for name, value in values.items():
        if value and isinstance(value, Mapping):
            result |= flat(cast("Mapping[Any, Any]", value), f"{prefix}{name}.")
        else:
            result[f"{prefix}{name}"] = value
    return result


def is_below(key: str, roots: tuple[str, ...]) -> bool:
    """Whether a key is one of these keys, or in one of these sections."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


def config_hash(values: Mapping[str, Any]) -> str:
    """A digest of the keys that decide the weights a configuration leads to.

    A key that is null counts as a missing one: a later version may have more of them.
    """
    deciding = {key: value for key, value in _without(values, FREE).items() if value is not None}
    return hashlib.blake2b(json.dumps(deciding, sort_keys=True).encode(), digest_size=8).hexdigest()


def same_results(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    """Whether two configurations lead to the same scores, bytes and, up to chance, times."""
    return _results(left) == _results(right)


def without_seeds(values: Mapping[str, Any]) -> str:
    """The same text for configurations that differ in their seeds and in nothing else of effect."""
    compared = _without(values, Effect.NOTHING | Effect.SEED)
    compared.pop("checkpoint.resume", None)
    return json.dumps(compared, sort_keys=True)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], new_run: bool) -> list[str]:
    """One line for each key that forbids resuming from a checkpoint.

    Args:
        new_run: whether the run has a folder of its own; False to resume in the old one.
    """
    return [
        _other(key, after, before) + (IN_A_NEW_RUN if can_change else "")
        for key, (before, after) in _changes(saved, now).items()
        if not ((can_change := bool(CHANGEABLE & effect_of(key))) and new_run)
    ]


def _other(key: str, after: Any, before: Any) -> str:
    typed = key.removesuffix(".name")
    return f"{typed} = {shown(after)}: the checkpoint was made with {shown(before)}"


def kept_groups(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, same_rows: bool
) -> frozenset[Group]:
    """The tensors of a checkpoint that a run goes on with.

    With the same configuration all; with another one the model and its optimizers; with other rows
    also what compressors remember. With other table servers all but what each of them keeps of its
    rows; where replicas are made equal at a checkpoint, no published weights, and no rows looked
    up ahead by trainers that were not.
    """
    changes = _changes(saved, now)
    if any(Effect.STATE in effect_of(key) for key in changes):
        return MODEL
    if not same_rows:
        return MODEL | {Group.COMPRESSOR}
    dropped: set[Group] = set()
    if "parallel.table_servers" in changes:
        dropped |= {Group.LOOKUPS, Group.LEVELS}  # each server has its part
    if _rests(now):
        dropped |= {Group.VERSIONS}
        if not _rests(saved) and flat(now).get("embedding.staleness"):
            dropped |= {Group.LOOKUPS}  # of batches that may be other trainers' now
    return frozenset(Group) - dropped


def _changes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values before and after of each key that decides a weight and has changed."""
    before, after = _without(saved, FREE), _without(now, FREE)
    values = {key: (_at(before, key), _at(after, key)) for key in before.keys() | after.keys()}
    return {key: values[key] for key in sorted(values) if values[key][0] != values[key][1]}


def _at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key; for a choice without such a key, the value that it acts by."""
    if key in values:
        return values[key]
    section, _, name = key.partition(".")
    base = sections().get(section, object)
    return plain(getattr(base, name, None)) if issubclass(base, Choice) else None


def _rests(values: Mapping[str, Any]) -> bool:
    """Whether replicas are made equal, and nothing is ahead, when a checkpoint is made."""
    keys = flat(values)
    return keys.get("sync.name") == "async" or bool(keys.get("parallel.elastic"))


def evaluated(
    saved: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values to score a checkpoint with, and a line for each key that contradicts it.

    Only keys typed on the command line (`keys`) count, not those it leaves at their defaults.
    """
    before, after = (_without(values, Effect.ANOTHER) for values in (saved, now))
    replacing = tuple(key for key in keys if Effect.EVALUATION in effect_of(key))
    faults = [
        _other(key, after[key], _at(before, key))
        for key in sorted(after)
        if is_below(key, tuple(keys))
        and not is_below(key, replacing)
        and _at(before, key) != after[key]
    ]
    return replaced(saved, now, (*replacing, "evaluate", "prepare")), faults


def replaced(
    values: Mapping[str, Any], source: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    """The values with those of `source` at some keys, or in whole sections."""
    result = dict(values)
    for key in keys:
        if "." not in key:
            result |= {key: source[key]} if key in source else {}
        elif key in (flat_source := flat(source)):
            result = with_value(result, key, flat_source[key])
        else:  # a section in it
            for name, value in flat_source.items():
                if is_below(name, (key,)):
                    result = with_value(result, name, value)
    return result


def with_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The values of nested sections with another value at a dotted key."""
    head, _, rest = key.partition(".")
    return {**values, head: with_value(values.get(head) or {}, rest, value) if rest else value}


def _results(values: Mapping[str, Any]) -> dict[str, Any]:
    deciding = _without(values, Effect.NOTHING)
    if deciding.get("sync.name") == "async":  # trainers rest at checkpoints
        deciding["checkpoint.every"] = flat(values).get("checkpoint.every")
    if deciding.get("checkpoint.resume") in FROM_ITSELF:
        del deciding["checkpoint.resume"]
    return deciding


def _without(values: Mapping[str, Any], effect: Effect) -> dict[str, Any]:
    """The values by dotted key, without those whose keys have one of these effects."""
    return {key: value for key, value in flat(values).items() if not effect & effect_of(key)}
