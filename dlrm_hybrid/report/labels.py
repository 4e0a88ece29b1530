"""Labels of runs, and what they trained, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, cast

from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.report.runs import Run
from dlrm_hybrid.types import printable

MAX_KEYS = 3  # with more varying keys a label would be too long
MAX_CHARACTERS = 100
UNNAMED = "unnamed"
HOW = ("skip_completed", "checkpoint.resume")  # say how a run was started, not what it is


def varying(overrides: Sequence[Sequence[str]]) -> dict[str, list[str | None]]:
    """Find the keys whose values differ between command lines, in order of appearance.

    Args:
        overrides: overrides `key=value` of each run; a `+` before the key is ignored.

    Returns:
        by key, its value in each run; None where the run does not name it.
    """
    lines = [{head_of(text): text.partition("=")[2] for text in line} for line in overrides]
    keys = dict.fromkeys(key for line in lines for key in line if key not in HOW)
    values = {key: [line.get(key) for line in lines] for key in keys}
    return {key: column for key, column in values.items() if len(set(column)) > 1}


def short(keys: Sequence[str]) -> dict[str, str]:
    """Shorten each key to its last part, unless another key has the same last part."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def labels(runs: Sequence[Run]) -> list[str]:
    """A different label for each run: its name, its varying overrides, or its folder."""
    names = [str(run.config.get("name", UNNAMED))[:MAX_CHARACTERS] for run in runs]
    candidates = [
        names,
        _with_overrides(names, [run.overrides for run in runs]),
        [f"{name} {run.folder.name}" for name, run in zip(names, runs, strict=True)],
        [str(run.folder) for run in runs],
    ]
    different = next(texts for texts in candidates if len(set(texts)) == len(runs))
    return list(map(printable, different))


def _with_overrides(names: Sequence[str], overrides: Sequence[Sequence[str]]) -> list[str]:
    changed = varying(overrides)
    if len(set(names)) > 1:
        changed.pop("experiment", None)  # the run's name says the same
    if "data.raw" in changed:
        changed.pop("data.prepared", None)  # of the same rows
        changed["data.raw"] = [value and _file_name(value) for value in changed["data.raw"]]
    if len(changed) > MAX_KEYS:
        return []
    ends = short(list(changed))
    texts: list[str] = []
    for index, name in enumerate(names):
        shown = [f"{ends[key]}={column[index]}" for key, column in changed.items() if column[index]]
        texts.append(" ".join([name, *shown] if len(set(names)) > 1 or not shown else shown))
    return texts


def _file_name(value: str) -> str:
    return value if value[0] in "[{'\"" else PurePath(value).name  # lists and quoted ones stay


MAX_NAMED = 3  # of more different values only their number is told


def trained(runs: Sequence[Run], *, with_steps: bool = True) -> str:
    """Describe in a line what all runs trained; values that differ are listed.

    Args:
        with_steps: whether to tell their steps, which mean little while a run goes on.
    """
    steps = {"Training": _steps} if with_steps else {}
    facts = {"Model": _model, "Data": _data, **steps, "World": _world}
    return " ".join(f"{name}: {_together(list(map(of, runs)))}." for name, of in facts.items())


def _together(values: Sequence[str]) -> str:
    different = list(dict.fromkeys(values))
    if len(different) > MAX_NAMED:
        return f"{len(different)} different, of which one is {different[0]}"
    return " or ".join(different)


def _model(run: Run) -> str:
    layers = [
        f"{part} {'-'.join(map(str, cast('Sequence[int]', _at(run, 'model', part))))}"
        for part in ("bottom", "top")
        if _at(run, "model", part)
    ]
    shape = f" ({', '.join(layers)})" if layers else ""  # only an own model knows its layers
    return f"{_at(run, 'model', 'name')}{shape}"


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
    table_servers: int = _at(run, "parallel", "table_servers") or 0
    stages = len(cast("Sequence[str]", _at(run, "parallel", "cuts") or ())) + 1
    is_alone = _at(run, "parallel", "world") == "in_process"
    size = trainers * stages + servers + table_servers
    ranks = f"{size} {'ranks in one process' if is_alone else 'processes'}"
    parts = ((trainers, "trainer"), (stages, "stage"), (servers, "server"))
    counted = [f"{count} {name}{'s' * (count != 1)}" for count, name in parts]
    if table_servers:
        counted[2] += f" + {table_servers} table server{'s' * (table_servers != 1)}"
    return f"{ranks} ({counted[0]} × {counted[1]} + {counted[2]})"


def _at(run: Run, section: str, key: str) -> Any:
    values = run.config.get(section)
    return cast("Mapping[str, Any]", values).get(key) if isinstance(values, Mapping) else None
