"""Finds run folders and reads their records."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

from dlrm_hybrid.checkpoint.folder import step_of
from dlrm_hybrid.checkpoint.manifest import is_folder_name
from dlrm_hybrid.config.identity import CONFIG_FILE
from dlrm_hybrid.disk import read_object
from dlrm_hybrid.run.folder import ENVIRONMENT_FILE, OVERRIDES_FILE, read_overrides
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event
from dlrm_hybrid.telemetry.summary import SUMMARY_FILE, UNFINISHED, summarise
from dlrm_hybrid.types import ConfigError, DataError

MAX_DEPTH = 4  # levels searched below a named folder
FAULTS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""Errors of code that reads values which are missing or not what they should be."""
DAMAGED = "is damaged, or of another version of the program"

Shown = TypeVar("Shown")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The record of one run.

    Attributes:
        config: the whole configuration, resolved.
        environment: commit, versions, processor; empty if it was not written.
        summary: `summary.json`; computed from the events, with the status `unfinished`, if the run
            is still training or was killed.
    """

    folder: Path
    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    events: tuple[Event, ...]

    @property
    def status(self) -> str:
        """Status: complete, failed, diverged, preempted, interrupted or unfinished."""
        return self.summary["status"]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """Find the run folders at and below `paths`, each once; raises ConfigError if a path has none.

    Numbers in their names are ordered by value.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        below = list(_below(path, MAX_DEPTH))
        if not below:
            raise ConfigError(f"report.runs = {path}: no run folder found here or below")
        for folder in below:
            folders.setdefault(folder.resolve(), folder)
    return list(folders.values())


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read all runs at and below `paths`.

    Raises:
        ConfigError: there is none at one of the paths.
        DataError: a file is missing or damaged; names it.
    """
    return [read_run(folder) for folder in find_runs(paths)]


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / CONFIG_FILE).is_file()


def read_run(folder: Path) -> Run:
    """Read the record of one run; a last event that is incomplete is left out.

    Raises:
        DataError: there is no configuration, a file is damaged or of another version of the
            program, or a link leads out of the folder; names the file.
    """
    config = read_object(folder, CONFIG_FILE)
    record, overrides, environment = (), (), {}
    if (folder / EVENTS_FILE).exists():
        record = tuple(events.read(folder / EVENTS_FILE))
    if (folder / OVERRIDES_FILE).exists():
        overrides = tuple(read_overrides(folder / OVERRIDES_FILE))
    if (folder / ENVIRONMENT_FILE).exists():
        environment = read_object(folder, ENVIRONMENT_FILE)
    cores = environment.get("cores", 1)
    if not isinstance(cores, int) or cores < 1:
        raise DataError(f"{folder / ENVIRONMENT_FILE}: cores = {cores!r:.40} is no number above 0")
    return Run(
        folder=folder,
        config=config,
        overrides=overrides,
        environment=environment,
        summary=_summary(folder, record, cores),
        events=record,
    )


def shown(runs: Sequence[Run], show: Callable[[Sequence[Run]], Shown]) -> Shown:
    """What `show` makes of runs, whose records may be of anybody.

    Raises:
        DataError: a value in a record is missing, or not what it should be; names the run folder.
    """
    try:
        return show(runs)
    except FAULTS as error:
        for run in runs if len(runs) > 1 else ():
            shown([run], show)  # names the one at fault
        folders = " or ".join(str(run.folder) for run in runs)
        raise DataError(f"{folders}: {DAMAGED}: {error!r:.200}") from error


def steps_before(runs: Sequence[Run]) -> list[int]:
    """The steps that each run goes on after: those of the runs here that it descends from.

    A run that goes on with new rows counts its own from 0.
    """
    here = {run.folder.resolve(): run for run in runs}
    return [_before(run, here) for run in runs]


def _before(run: Run, here: Mapping[Path, Run]) -> int:
    ancestors: Sequence[str] = run.summary.get("descends_from") or [""]
    folder = Path(ancestors[-1])
    parent = here.get(folder.parent.parent.resolve())
    if parent is None or run.summary["first_step"] or not is_folder_name(folder.name):
        return 0
    others = {path: other for path, other in here.items() if other is not run}
    return step_of(folder) + _before(parent, others)


def _summary(folder: Path, record: Sequence[Event], cores: int) -> Mapping[str, Any]:
    """The summary; events are summarised in any case, which detects another version."""
    try:
        computed = summarise(record, UNFINISHED, cores)
    except FAULTS as error:
        raise DataError(f"{folder / EVENTS_FILE}: {DAMAGED}: {error!r:.200}") from None
    if not (folder / SUMMARY_FILE).exists():
        return computed
    summary = read_object(folder, SUMMARY_FILE)
    if missing := sorted(computed.keys() - summary.keys()):
        fault = f"is of another version of the program: has no {', '.join(missing)}"
        raise DataError(f"{folder / SUMMARY_FILE}: {fault}")
    return summary


def _below(path: Path, depth: int) -> Iterator[Path]:
    if is_run(path):
        yield path
    elif depth and path.is_dir():
        folders = [entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] != "."]
        for entry in sorted(folders, key=_natural):
            yield from _below(entry, depth - 1)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that orders numbers in names by value: 10 comes after 9."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]
