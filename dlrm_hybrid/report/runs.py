"""Finds run folders and reads what is in them; what the program would not write is left out."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, final

from dlrm_hybrid.config.identity import CONFIG_FILE
from dlrm_hybrid.disk import read_object
from dlrm_hybrid.run.folder import OVERRIDES_FILE, read_overrides
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.distributions.staleness import Staleness
from dlrm_hybrid.telemetry.events import EVENTS_FILE, Event
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.summary import SUMMARY_FILE, UNFINISHED, summarise, world_sync
from dlrm_hybrid.types import ConfigError, DataError, printable

MOST = 1e24  # of what is measured, and may be drawn
MOST_GIVEN = sys.float_info.max  # of configured values
UNKNOWN = "unknown"
STATUS_CHARACTERS = 40


def plain(value: Any, most: float = MOST) -> Any:
    """JSON values without escapes, None for numbers that are not finite or above `most`."""
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[str, Any]", value).items()
        return {printable(key): plain(inner, most) for key, inner in items}
    if isinstance(value, (list, tuple)):
        return [plain(inner, most) for inner in cast("list[Any]", value)]
    if isinstance(value, (int, float)) and not -most <= value <= most:
        return None
    return value


def read_summary(given: Mapping[str, Any]) -> dict[str, Any]:
    """All figures of a summary, None where `given` lacks them or has something else.

    Args:
        given: the content of `summary.json`, through `plain`.
    """
    summary = _like(given, summarise([], UNKNOWN, 1))
    if "validation" in given:
        summary["validation"] = _like(given["validation"], summarise([], UNKNOWN, 1)["test"])
    status = given.get("status")
    summary["status"] = status[:STATUS_CHARACTERS] if isinstance(status, str) else UNKNOWN
    network, network_given = summary["network"], _mapping(given.get("network"))
    network["by_class"] = _entries(network_given.get("by_class"), _tally)
    shares = _entries(network_given.get("utilization_by_rank"), _number)
    network["utilization_by_rank"] = shares or None
    summary["roles"] = _entries(given.get("roles"), _role)
    summary["sync"] = _sync(given.get("sync"))
    steps, steps_given = summary["step_milliseconds"], _mapping(given.get("step_milliseconds"))
    figures = {name: None for name in steps if name != "by_trainer"}
    steps["by_trainer"] = _entries(
        steps_given.get("by_trainer"), lambda trainer: _like(trainer, figures)
    )
    ids_given = _mapping(given.get("distinct_ids_per_batch"))
    ids = _entries(ids_given.get("by_trainer"), _number)
    summary["distinct_ids_per_batch"]["by_trainer"] = ids
    return summary


def _like(value: Any, skeleton: Mapping[str, Any]) -> dict[str, Any]:
    given = _mapping(value)
    kept = {key: inner for key, inner in given.items() if key not in skeleton}
    for key, inner in skeleton.items():
        if isinstance(inner, Mapping):
            kept[key] = _like(given.get(key), cast("Mapping[str, Any]", inner))
        else:
            kept[key] = _number(given.get(key))
    return kept


def _sync(value: Any) -> dict[str, Any] | None:
    given, skeleton = _mapping(value), world_sync([], [0], {})
    if not given or skeleton is None:
        return None
    sync = _like(given, skeleton)
    by_trainer = _mapping(_mapping(given.get("staleness")).get("by_trainer"))
    figures = Staleness().values()
    sync["staleness"]["by_trainer"] = _entries(by_trainer, lambda one: _like(one, figures))
    sync["batches_by_trainer"] = _entries(given.get("batches_by_trainer"), _number)
    return sync


def _mapping(value: Any) -> Mapping[str, Any]:
    return cast("Mapping[str, Any]", value) if isinstance(value, Mapping) else {}


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return value if is_number else None


def _entries(value: Any, read: Callable[[Any], Any]) -> dict[str, Any]:
    """Those entries that can be read."""
    found = {key: read(inner) for key, inner in _mapping(value).items()}
    return {key: inner for key, inner in found.items() if inner is not None}


def _tally(value: Any) -> dict[str, Any] | None:
    names = ("bytes", "dense_equivalent_bytes", "messages")
    tally = {name: _number(_mapping(value).get(name)) for name in names}
    return None if None in tally.values() else tally


def _role(value: Any) -> dict[str, Any] | None:
    given = _mapping(value)
    if not isinstance(given.get("role"), str):
        return None
    spans = _entries(given.get("seconds_by_span"), _number)
    phases = _entries(given.get("seconds_by_phase"), _number)
    figures = (
        *("cpu_utilization", "cpu_seconds", "thread_cpu_seconds", "threads", "peak_rss_bytes"),
        *("bytes_sent", "bytes_received"),
    )
    return {
        **given,
        **{name: _number(given.get(name)) for name in figures},
        "seconds_by_span": spans if all(span in spans for span in Span) else {},
        "seconds_by_wait": _entries(given.get("seconds_by_wait"), _number),
        "seconds_by_phase": phases if "train" in phases else None,
    }


MAX_DEPTH = 4  # folders between one that is named and a run below it


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What the folder of one run has on record.

    Attributes:
        folder: where it is.
        config: the whole configuration, resolved.
        overrides: of the command line.
        environment: commit, versions, processor; empty if it was not written.
        summary: `summary.json`; made from the events, with the status `unfinished`, where a run
            is still training or was killed.
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
    given = _object(folder, SUMMARY_FILE, remarks)
    if given is None:
        given = plain(summarise(record, UNFINISHED, cores=environment["cores"]))
    return Run(
        folder=folder,
        config=config,
        overrides=_overrides(folder / OVERRIDES_FILE, remarks),
        environment=environment,
        summary=read_summary(given),
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
    """Sorts numbers in names by value: 10 comes after 9."""
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
    if not path.exists():
        return ()
    try:
        return tuple(map(printable, read_overrides(path)))
    except DataError as error:
        remarks.append(f"left out: {error}")
        return ()
