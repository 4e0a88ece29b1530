"""The keys that make two runs the same run: those that decide a weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from dlrm_hybrid.compress.gradient.methods import find
from dlrm_hybrid.config.keys import effect_of, sections
from dlrm_hybrid.record import Choice, Effect, plain

CONFIG_FILE = "config.json"  # the configuration of a run, in its folder

STALE_SCHEDULE = "dsp"  # the schedule with which batches are in flight between steps
# Values of checkpoint.resume that begin with no other run's weights.
FROM_ITSELF = ("never", "auto")
FREE = Effect.NOTHING | Effect.FREE


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
        saved: the values that the checkpoint was made with.
        now: the values of this run.
        new_run: whether the run has a folder of its own; False to resume in the old one.
    """
    before, after = _without(saved, FREE), _without(now, FREE)
    fixed = "gradient.residual" if _waits_otherwise(before, after) else ""
    return [
        f"{key} = {_at(after, key)}: the checkpoint was made with {_at(before, key)}"
        for key in sorted(before.keys() | after.keys())
        if _at(before, key) != _at(after, key)
        and not (new_run and Effect.NEW_RUN in effect_of(key) and key != fixed)
    ]


def same_compressors(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the state of compressors fits as it is."""
    return _same(saved, now, Effect.COMPRESSORS)


def same_versions(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the versions of weights that workers had fit as they are."""
    return _same(saved, now, Effect.VERSIONS) and _rests(saved) == _rests(now)


def same_lookups(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether rows that were looked up ahead, or are kept, fit as they are.

    Where all trainers rest no rows are ahead; else those of the next batches must be there.
    """
    is_ahead = bool(flat(now).get("embedding.staleness"))
    return _same(saved, now, Effect.LOOKUPS) and (not is_ahead or _rests(saved) == _rests(now))


def same_levels(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the state of both ends of rows that were sent as levels fits as it is."""
    return _same(saved, now, Effect.LEVELS)


def in_flight(facts: Mapping[str, Any]) -> bool:
    """Whether a checkpoint with these facts was made while batches were between two stages."""
    progress, schedule = facts["progress"], facts["config"].get("schedule", {})
    name = str(schedule.get("name"))
    is_late = ":" in name or (name == STALE_SCHEDULE and any(schedule["staleness"]))
    return is_late and progress["step"] > progress.get("emptied", 0)


def other_flights(facts: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each key with which a run cannot go on with the batches in flight."""
    if not in_flight(facts):
        return []
    before, after = _without(facts["config"], FREE), _without(now, FREE)
    return [
        f"{key} = {_at(after, key)}: the checkpoint was made with {_at(before, key)}, and holds "
        "batches in flight; that at the end of its run holds none"
        for key in sorted(before.keys() | after.keys())
        if Effect.FLIGHTS in effect_of(key) and _at(before, key) != _at(after, key)
    ]


def _at(values: Mapping[str, Any], key: str) -> Any:
    """The value of a key; for a choice without such a key, the value that it acts by."""
    if key in values:
        return values[key]
    section, _, name = key.partition(".")
    base: Any = sections().get(section)
    is_choice = isinstance(base, type) and issubclass(cast("type[object]", base), Choice)
    return plain(getattr(base, name, None)) if is_choice else None


def _rests(values: Mapping[str, Any]) -> bool:
    """Whether replicas are made equal, and nothing is ahead, when a checkpoint is made."""
    keys = flat(values)
    return keys.get("sync.name") == "async" or bool(keys.get("parallel.elastic"))


def _same(saved: Mapping[str, Any], now: Mapping[str, Any], effect: Effect) -> bool:
    """Whether all keys with an effect that decide a weight have the same values."""
    before, after = _without(saved, FREE), _without(now, FREE)
    return all(
        _at(before, key) == _at(after, key)
        for key in before.keys() | after.keys()
        if effect in effect_of(key)
    )


def evaluated(
    saved: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values to score a checkpoint with, and a line for each key that contradicts it.

    Only keys typed on the command line (`keys`) count, not those it leaves at their defaults.
    """
    before, after = (_without(values, Effect.ANOTHER) for values in (saved, now))
    replacing = tuple(key for key in keys if Effect.EVALUATION in effect_of(key))
    faults = [
        f"{key} = {after[key]}: the checkpoint was made with {_at(before, key)}"
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


def _waits_otherwise(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether residuals hold gradients in one of the runs, and finished updates in the other."""
    chosen = [find(str(values.get("gradient.name"))) for values in (before, after)]
    keep = all(method is not None and method.is_sparse for method in chosen)
    as_updates = {values.get("gradient.residual") == "update" for values in (before, after)}
    return keep and len(as_updates) > 1


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
