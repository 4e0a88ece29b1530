"""What runs have trained, in words: model, rows, steps and world."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from dlrm_hybrid.report.runs import Run

MAX_NAMED = 3  # different values; of more it says how many


def trained(runs: Sequence[Run]) -> str:
    """A line on all runs together; where they differ it names the values."""
    facts = {
        "model": [_model(run) for run in runs],
        "data": [_data(run) for run in runs],
        "training": [_steps(run) for run in runs],
        "world": [_world(run) for run in runs],
    }
    return " ".join(f"{name.title()}: {_together(values)}." for name, values in facts.items())


def _together(values: Sequence[str]) -> str:
    different = list(dict.fromkeys(values))
    if len(different) > MAX_NAMED:
        return f"{len(different)} different, of which one is {different[0]}"
    return " or ".join(different)


def _model(run: Run) -> str:
    layers = [
        f"{part} {'-'.join(map(str, cast('Sequence[int]', _at(run, 'model', part) or ())))}"
        for part in ("bottom", "top")
    ]
    return f"{_at(run, 'model', 'name')} ({', '.join(layers)})"


def _data(run: Run) -> str:
    rows = _at(run, "data", "rows")
    counted = f", {rows:,} rows" if isinstance(rows, int) else ""
    return f"{_at(run, 'data', 'name')}{counted}"


def _steps(run: Run) -> str:
    steps: int = run.summary["steps"]
    samples: int = run.summary["samples"]
    return f"{steps:,} steps of {samples // steps:,} samples" if steps else "no step"


def _world(run: Run) -> str:
    if _at(run, "parallel", "name") == "single":
        return "one process"
    trainers: int = _at(run, "parallel", "trainers") or 1
    servers: int = _at(run, "parallel", "servers") or 0
    stages = len(cast("Sequence[str]", _at(run, "parallel", "cuts") or ())) + 1
    is_alone = _at(run, "parallel", "world") == "in_process"
    ranks = f"{trainers * stages + servers} {'ranks in one process' if is_alone else 'processes'}"
    parts = ((trainers, "trainer"), (stages, "stage"), (servers, "server"))
    counted = [f"{count} {name}{'s' * (count != 1)}" for count, name in parts]
    return f"{ranks} ({counted[0]} × {counted[1]} + {counted[2]})"


def _at(run: Run, section: str, key: str) -> Any:
    """What the configuration has there, None where it has nothing."""
    values = run.config.get(section)
    return cast("Mapping[str, Any]", values).get(key) if isinstance(values, Mapping) else None
