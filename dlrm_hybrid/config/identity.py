"""Which keys make two runs the same run: those that decide a weight."""

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
    found: dict[str, Any] = {}
    for name, value in values.items():
        if value and isinstance(value, Mapping):
            found |= flat(cast("Mapping[Any, Any]", value), f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def is_below(key: str, roots: tuple[str, ...]) -> bool:
    """Whether a key is one of these keys, or in one of these sections."""
    return any(key == root or key.startswith(f"{root}.") for root in roots)


def config_hash(values: Mapping[str, Any]) -> str:
    """Identifies the weights a configuration leads to, whatever is in the keys that are free.

    A key that is null is as one that is not there: a later version may have more of them.
    """
    kept = {key: value for key, value in _without(values, FREE).items() if value is not None}
    return hashlib.blake2b(json.dumps(kept, sort_keys=True).encode(), digest_size=8).hexdigest()


def same_results(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two configurations lead to the same scores, bytes and, up to chance, times."""
    return _results(one) == _results(other)


def without_seeds(values: Mapping[str, Any]) -> str:
    """The same text for configurations that differ in their seeds and in nothing else of effect."""
    kept = _without(values, Effect.NOTHING | Effect.SEED)
    kept.pop("checkpoint.resume", None)
    return json.dumps(kept, sort_keys=True)


def differences(saved: Mapping[str, Any], now: Mapping[str, Any], new_run: bool) -> list[str]:
    """One line for each key that forbids resuming from a checkpoint.

    Args:
        saved: the values the checkpoint was made with.
        now: the values of this run.
        new_run: a run folder of its own; False to resume in the old one.
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
    """Whether what compressors remembered fits as it is."""
    return _same(saved, now, Effect.COMPRESSORS)


def same_versions(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether the versions of weights that workers had fit as they are."""
    return _same(saved, now, Effect.VERSIONS) and _rests(saved) == _rests(now)


def same_lookups(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether rows that were looked up ahead, or are kept, fit as they are.

    Where all rest no rows are ahead; else those of the next batches must be there.
    """
    is_ahead = bool(flat(now).get("embedding.staleness"))
    return _same(saved, now, Effect.LOOKUPS) and (not is_ahead or _rests(saved) == _rests(now))


def same_levels(saved: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether what ends remember of rows that were sent as levels fits as it is."""
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
    """The value of a key; of a choice that has no such key what it does without."""
    if key in values:
        return values[key]
    section, _, name = key.partition(".")
    base: Any = sections().get(section)
    is_choice = isinstance(base, type) and issubclass(cast("type[object]", base), Choice)
    return plain(getattr(base, name, None)) if is_choice else None


def _rests(values: Mapping[str, Any]) -> bool:
    """Whether all is made equal, and nothing is ahead, where a checkpoint is made."""
    given = flat(values)
    return given.get("sync.name") == "async" or bool(given.get("parallel.elastic"))


def _same(saved: Mapping[str, Any], now: Mapping[str, Any], effect: Effect) -> bool:
    """Whether all keys with an effect that decide a weight have the same values."""
    before, after = _without(saved, FREE), _without(now, FREE)
    return all(
        _at(before, key) == _at(after, key)
        for key in before.keys() | after.keys()
        if effect in effect_of(key)
    )


def evaluated(
    saved: Mapping[str, Any], now: Mapping[str, Any], given: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """What a checkpoint is scored with, and a line for each key that contradicts it.

    Of a command line only what was typed there counts, not what it leaves at its default.
    """
    before, after = (_without(one, Effect.ANOTHER) for one in (saved, now))
    taken = tuple(key for key in given if Effect.EVALUATION in effect_of(key))
    faults = [
        f"{key} = {after[key]}: the checkpoint was made with {_at(before, key)}"
        for key in sorted(after)
        if is_below(key, tuple(given))
        and not is_below(key, taken)
        and _at(before, key) != after[key]
    ]
    return replaced(saved, now, (*taken, "evaluate", "prepare")), faults


def replaced(
    values: Mapping[str, Any], others: Mapping[str, Any], keys: Sequence[str]
) -> dict[str, Any]:
    """The values with those of `others` at some keys, or in whole sections."""
    found = dict(values)
    for key in keys:
        if "." not in key:
            found |= {key: others[key]} if key in others else {}
        elif key in (given := flat(others)):
            found = with_value(found, key, given[key])
        else:  # a section in it
            for name, value in given.items():
                if is_below(name, (key,)):
                    found = with_value(found, name, value)
    return found


def with_value(values: Mapping[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The values of nested sections with another one at a dotted key."""
    head, _, rest = key.partition(".")
    return {**values, head: with_value(values.get(head) or {}, rest, value) if rest else value}


def _waits_otherwise(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether what waits is gradients in one of the runs, and finished updates in the other."""
    chosen = [find(str(one.get("gradient.name"))) for one in (before, after)]
    keep = all(method is not None and method.is_sparse for method in chosen)
    as_updates = {one.get("gradient.residual") == "update" for one in (before, after)}
    return keep and len(as_updates) > 1


def _results(values: Mapping[str, Any]) -> dict[str, Any]:
    kept = _without(values, Effect.NOTHING)
    if kept.get("sync.name") == "async":  # trainers rest at checkpoints
        kept["checkpoint.every"] = flat(values).get("checkpoint.every")
    if kept.get("checkpoint.resume") in FROM_ITSELF:
        del kept["checkpoint.resume"]
    return kept


def _without(values: Mapping[str, Any], effect: Effect) -> dict[str, Any]:
    """The values by dotted key, but those whose keys have one of these effects."""
    return {key: value for key, value in flat(values).items() if not effect & effect_of(key)}
