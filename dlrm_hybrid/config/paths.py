"""The paths in a configuration, which a record must not read from another directory otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from dlrm_hybrid.config.identity import FROM_ITSELF, flat, is_below, replaced, with_value
from dlrm_hybrid.config.keys import keys_of
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.data.schemas.reading import is_builtin
from dlrm_hybrid.record import Effect

ROWS = "data.prepared"


def recorded(values: Mapping[str, Any], rows: Path) -> dict[str, Any]:
    """The values of a configuration as runs and checkpoints keep them."""
    return with_value(absolute(values), ROWS, full(rows))


def absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration with paths that mean the same from every directory."""
    result, paths = dict(values), flat(values)
    for key in keys_of(Effect.PATH):
        value = paths.get(key)
        if isinstance(value, str):
            result = with_value(result, key, _absolute(key, value))
        elif isinstance(value, (list, tuple)):
            several = [_absolute(key, path) for path in cast("list[str]", value)]
            result = with_value(result, key, several)
    return result


def _absolute(key: str, value: str) -> str:
    is_name = key == "checkpoint.resume" and value in FROM_ITSELF
    is_name |= key == "data.schema" and is_builtin(value)
    return value if is_name else full(value)


def full(path: str | Path) -> str:
    """The same path from every directory; links stay."""
    return os.path.normpath(Path(path).absolute())


def resumed(
    saved: Mapping[str, Any], now: Mapping[str, Any], keys: Sequence[str]
) -> tuple[dict[str, Any], list[str]]:
    """The values a run goes on with, and a line for each place that it wrote to and may not now.

    A run folder may come from anyone: its values are taken, but for places to write to, which are
    as the command line has them.
    """
    # Where `data.prepared` is null the readers of rows alone know the folder, and compare it later.
    before, after, places = flat(saved), flat(now), keys_of(Effect.PLACE)
    ours = [key for key in (*places, ROWS) if key in before and not is_below(key, tuple(keys))]
    values = replaced(saved, now, [key for key in keys if key in now or "." in key])
    for key in ours:
        if key in flat(values):
            values = with_value(values, key, after.get(key))
    faults = [
        elsewhere(key, str(before.get(key)), after.get(key))
        for key in places
        if not is_below(key, tuple(keys)) and _place(before.get(key)) != _place(after.get(key))
    ]
    return values, faults


def elsewhere(key: str, before: str, after: str | None) -> str:
    """The fault of a run that would go on with another place to write to than it had."""
    return (
        f"{key} = {'null' if after is None else after}: the run has {before}, but no run folder "
        f"decides where anything is written; to go on there, add {override_text(key, before)}"
    )


def _place(value: Any) -> Any:
    return full(value) if isinstance(value, str) else value
