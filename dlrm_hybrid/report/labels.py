"""Short names that tell the runs of one report apart."""

from __future__ import annotations

from collections.abc import Sequence

from dlrm_hybrid.report.runs import Run

MAX_KEYS = 3  # more than that are no name
MAX_CHARACTERS = 100
UNNAMED = "unnamed"
HOW = ("skip_completed", "checkpoint.resume")  # how a run was started, not what it is


def varying(overrides: Sequence[Sequence[str]]) -> dict[str, list[str | None]]:
    """Keys that do not stand on every command line with the same value, in order of appearance.

    Args:
        overrides: of each run, as `key=value`; a `+` before the key counts for nothing.

    Returns:
        by key its value in each run, None where the run does not name it.
    """
    lines = [dict(_parted(text) for text in line) for line in overrides]
    keys = dict.fromkeys(key for line in lines for key in line if key not in HOW)
    values = {key: [line.get(key) for line in lines] for key in keys}
    return {key: column for key, column in values.items() if len(set(column)) > 1}


def short(keys: Sequence[str]) -> dict[str, str]:
    """The last part of each key, or all of it where two keys end alike."""
    ends = [key.rpartition(".")[2] for key in keys]
    return {key: end if ends.count(end) == 1 else key for key, end in zip(keys, ends, strict=True)}


def labels(runs: Sequence[Run]) -> list[str]:
    """One for each run, all different: its name, what it was started with, or its folder."""
    names = [str(run.config.get("name", UNNAMED))[:MAX_CHARACTERS] for run in runs]
    candidates = [
        names,
        _with_overrides(names, [run.overrides for run in runs]),
        [f"{name} {run.folder.name}" for name, run in zip(names, runs, strict=True)],
        [str(run.folder) for run in runs],
    ]
    return next(texts for texts in candidates if len(set(texts)) == len(runs))


def _with_overrides(names: Sequence[str], overrides: Sequence[Sequence[str]]) -> list[str]:
    changed = varying(overrides)
    if len(set(names)) > 1:
        changed.pop("experiment", None)  # it has given the run its name
    if len(changed) > MAX_KEYS:
        return []
    ends = short(list(changed))
    texts: list[str] = []
    for index, name in enumerate(names):
        said = [f"{ends[key]}={column[index]}" for key, column in changed.items() if column[index]]
        texts.append(" ".join([name, *said] if len(set(names)) > 1 or not said else said))
    return texts


def _parted(text: str) -> tuple[str, str]:
    key, _, value = text.lstrip("+~").partition("=")
    return key, value
