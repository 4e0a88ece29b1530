"""The paths in a configuration, which a record must not read from another directory otherwise."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from dlrm_hybrid.config.identity import FROM_ITSELF, flat, with_value
from dlrm_hybrid.data.schemas.reading import is_builtin

# Of `train`; other commands' paths are in no record.
PATHS = (
    *("conf", "data.raw", "data.schema", "data.prepared", "embedding.folder"),
    *("sync.replay", "network.keys", "checkpoint.resume"),
)


def recorded(values: Mapping[str, Any], rows: Path) -> dict[str, Any]:
    """The values of a configuration as runs and checkpoints keep them.

    Args:
        values: of the run.
        rows: the folder of its prepared rows, whatever the values say.
    """
    return with_value(absolute(values), "data.prepared", _full(rows))


def absolute(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a configuration with paths that mean the same from every directory."""
    found, given = dict(values), flat(values)
    for key in PATHS:
        value = given.get(key)
        if isinstance(value, str):
            found = with_value(found, key, _absolute(key, value))
        elif isinstance(value, (list, tuple)):
            several = [_absolute(key, one) for one in cast("list[str]", value)]
            found = with_value(found, key, several)
    return found


def _absolute(key: str, value: str) -> str:
    is_name = key == "checkpoint.resume" and value in FROM_ITSELF
    is_name |= key == "data.schema" and is_builtin(value)
    return value if is_name else _full(value)


def _full(path: str | Path) -> str:
    return os.path.normpath(Path(path).absolute())
