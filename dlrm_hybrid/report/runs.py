"""Finds run folders and reads what stands in them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import Event
from dlrm_hybrid.telemetry.summary import summarise
from dlrm_hybrid.types import ConfigError, DataError

CONFIG_FILE, EVENTS_FILE, SUMMARY_FILE = "config.json", "events.jsonl", "summary.json"
MAX_DEPTH = 4  # folders between one that is named and a run below it
COMPLETE, UNFINISHED = "complete", "unfinished"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run folder.

    Attributes:
        folder: where it is.
        config: the whole configuration, resolved.
        overrides: what stood on the command line.
        environment: commit, versions, processor; empty if nobody wrote it.
        summary: `summary.json`; made from the events, with the status `unfinished`, where a run
            is going on or was killed.
        events: all on record, in order.
    """

    folder: Path
    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    events: tuple[Event, ...]

    @property
    def status(self) -> str:
        """complete, failed, diverged, preempted, interrupted or unfinished."""
        return self.summary["status"]


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among `paths` and below them, each once, numbers in numeric order.

    Raises:
        ConfigError: there is none at one of the paths.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        below = list(_below(path, MAX_DEPTH))
        if not below:
            raise ConfigError(f"report.runs = {path}: no run folder is here or below")
        for folder in below:
            found.setdefault(folder.resolve(), folder)
    return list(found.values())


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """All runs at `paths` and below them.

    Raises:
        ConfigError: there is none at one of the paths.
        DataError: a file is missing or damaged; names it.
    """
    return [read_run(folder) for folder in find_runs(paths)]


def is_run(folder: Path) -> bool:
    """Whether a run has begun in this folder."""
    return (folder / CONFIG_FILE).is_file()


def read_run(folder: Path) -> Run:
    """Everything on record of one run.

    Raises:
        DataError: a file is missing or damaged; names it.
    """
    config = _json(folder / CONFIG_FILE)
    record = _events(folder / EVENTS_FILE)
    environment = _json_if_there(folder / "environment.json") or {}
    summary = _json_if_there(folder / SUMMARY_FILE)
    if summary is None:
        summary = summarise(record, UNFINISHED, cores=environment.get("cores", 1))
    return Run(
        folder=folder,
        config=config,
        overrides=_overrides(folder / "overrides.yaml"),
        environment=environment,
        summary=summary,
        events=record,
    )


def _below(path: Path, depth: int) -> Iterator[Path]:
    if is_run(path):
        yield path
    elif depth and path.is_dir():
        folders = [entry for entry in path.iterdir() if entry.is_dir() and entry.name[0] != "."]
        for entry in sorted(folders, key=_natural):
            yield from _below(entry, depth - 1)


def _natural(path: Path) -> list[tuple[int, str]]:
    """10 comes after 9."""
    parts = re.split(r"(\d+)", path.name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _json_if_there(path: Path) -> Mapping[str, Any] | None:
    return _json(path) if path.exists() else None


def _json(path: Path) -> Mapping[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{path}: is not an object")
    return value  # pyright: ignore[reportUnknownVariableType]


def _events(path: Path) -> tuple[Event, ...]:
    if not path.exists():
        return ()
    try:
        return tuple(events.read(path))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _overrides(path: Path) -> tuple[str, ...]:
    """A YAML list of quoted strings, one a line, as the program writes it."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return tuple(json.loads(line[2:]) for line in lines if line.startswith("- "))
    except ValueError as error:
        raise DataError(f"{path}: is not the list that the program wrote: {error}") from error
