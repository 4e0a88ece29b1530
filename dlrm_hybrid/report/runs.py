"""Finds run folders and reads what stands in them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

from pydantic_core import from_json

from dlrm_hybrid.disk import MOST_JSON_BYTES, read_object, read_text
from dlrm_hybrid.report.foreign import MOST_GIVEN, plain, read_summary
from dlrm_hybrid.run.request import CONFIG_FILE
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event
from dlrm_hybrid.telemetry.summary import SUMMARY_FILE, UNFINISHED, summarise
from dlrm_hybrid.types import ConfigError, DataError, printable

MAX_DEPTH = 4  # folders between one that is named and a run below it


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
        remarks: what was left out, since it could not be read.
    """

    folder: Path
    config: Mapping[str, Any]
    overrides: tuple[str, ...]
    environment: Mapping[str, Any]
    summary: Mapping[str, Any]
    events: tuple[Event, ...]
    remarks: tuple[str, ...] = ()

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
            raise ConfigError(f"report.runs = {path}: no run folder found here or below")
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

    What is not as the program writes it, in events or summary, is left out and remarked on.

    Raises:
        DataError: there is no configuration, or a link leads out of the folder; names the file.
    """
    config = plain(read_object(folder, CONFIG_FILE), MOST_GIVEN)
    remarks: list[str] = []
    record, faults = _events(folder)
    if faults:
        remarks.append(f"{len(faults)} lines of events left out, the first: {faults[0]}")
    environment = _object(folder, "environment.json", remarks) or {}
    cores = environment.get("cores")
    environment["cores"] = cores if isinstance(cores, int) and 0 < cores < 2**20 else 1
    told = _object(folder, SUMMARY_FILE, remarks)
    if told is None:
        told = plain(summarise(record, UNFINISHED, cores=environment["cores"]))
    return Run(
        folder=folder,
        config=config,
        overrides=_overrides(folder / "overrides.yaml", remarks),
        environment=environment,
        summary=read_summary(told),
        events=tuple(record),
        remarks=tuple(printable(remark) for remark in remarks),
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


def _object(folder: Path, file: str, remarks: list[str]) -> dict[str, Any] | None:
    """What a file says, if it is there; what cannot be read is remarked on."""
    if not (folder / file).exists():
        return None
    try:
        return plain(read_object(folder, file))
    except DataError as error:
        remarks.append(f"left out: {error}")
        return None


def _events(folder: Path) -> tuple[list[Event], list[str]]:
    path = folder / EVENTS_FILE
    if not path.exists():
        return [], []
    found, faults = events.check(path)
    return [replace(event, values=plain(event.values)) for event in found], faults


def _overrides(path: Path, remarks: list[str]) -> tuple[str, ...]:
    """A YAML list of quoted strings, one a line, as the program writes it."""
    if not path.exists():
        return ()
    try:
        text = read_text(path.parent, path.name, MOST_JSON_BYTES)
        lines = [line[2:] for line in text.splitlines() if line.startswith("- ")]
        return tuple(printable(str(from_json(line))) for line in lines)
    except (ValueError, DataError) as error:
        remarks.append(f"left out: {path}: is not the list that the program wrote: {error}")
        return ()
