"""The folder of a run: its lock, and the files in it beside those of ranks."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from dlrm_hybrid.checkpoint.folder import find, has_checkpoint, later, read_facts
from dlrm_hybrid.checkpoint.manifest import MANIFEST_FILE, Score
from dlrm_hybrid.config.choices import Table
from dlrm_hybrid.config.identity import (
    CONFIG_FILE,
    FROM_ITSELF,
    config_hash,
    differences,
    flat,
    kept_groups,
    same_results,
    with_value,
)
from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.config.model import with_table_dims
from dlrm_hybrid.config.paths import ROWS, absolute, elsewhere, full, recorded
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text, own_values, validate
from dlrm_hybrid.data.folder import look_like, note_run
from dlrm_hybrid.data.manifest import Manifest
from dlrm_hybrid.data.preprocessing import PREPROCESSING_FOLDER, keep, read_kept
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.disk import (
    MOST_JSON_BYTES,
    RUN_FOLDER_KEY,
    HeldError,
    append,
    check_inside,
    locked,
    read_object,
    read_text,
    replace_text,
    writing,
)
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.telemetry import events
from dlrm_hybrid.telemetry.events import EVENTS_FILE
from dlrm_hybrid.telemetry.machine import describe
from dlrm_hybrid.telemetry.summary import COMPLETE, SUMMARY_FILE, summarise
from dlrm_hybrid.types import ConfigError, DataError, Group

LOCK_FILE = ".lock"
TRACKERS = ("wandb",)  # they link to files of their own elsewhere
OUTPUT_FILE = "output.log"  # output of a job that runs beside others
ENVIRONMENT_FILE, OVERRIDES_FILE = "environment.json", "overrides.yaml"
BASE = "data.base"
ANCESTORS = "ancestors"
ORIGIN_FILE = "origin.json"  # names the checkpoint of another run that this one began from
STATE: Mapping[Group, str] = {
    Group.COMPRESSOR: "residuals and thresholds",
    Group.VERSIONS: "published weights",
    Group.LOOKUPS: "rows looked up ahead or cached",
    Group.LEVELS: "copies and residuals of rows sent as levels",
    Group.FLIGHT: "batches in flight",
}


@contextmanager
def one_user(lock: Path, key: str, subject: Path) -> Generator[None, None, None]:
    """Keep other processes from using `subject` inside a `with`.

    Args:
        lock: the lock file.
        key: configuration key that names `subject`.
        subject: a folder or file.

    Raises:
        ConfigError: another process uses it; names process and host.
        ResourceError: the lock file cannot be made.
    """
    with ExitStack() as stack:
        try:
            with writing(lock, key):
                stack.enter_context(locked(lock))
        except HeldError as error:
            raise _fault(f"{key} = {subject}: in use by {error}") from None
        yield


@contextmanager
def one_run(folder: Path, key: str = RUN_FOLDER_KEY) -> Generator[None, None, None]:
    """Lock a folder against other runs and sweeps inside a `with`; see `one_user`.

    Raises:
        DataError: a link in it leads out of it.
    """
    with one_user(folder / LOCK_FILE, key, folder):
        check_inside(folder, apart=TRACKERS)
        yield


def claim(request: Request, is_restart: bool = False) -> Path | None:
    """Take the folder for this run; returns the folder to resume from, if any.

    The caller has it locked, see `one_run`.

    `never` and a path need an empty folder; `auto` resumes in a folder with the same run, if
    unfinished, and so does `skip_completed` for the jobs of a sweep.

    Args:
        request: the run.
        is_restart: whether this run has claimed the folder before.

    Raises:
        ConfigError: the folder holds something else, or a run that is complete.
    """
    folder, resume = request.folder, request.config.checkpoint.resume
    used = any(path.name not in (LOCK_FILE, OUTPUT_FILE) for path in folder.iterdir())
    if used and (is_restart or resume == "auto" or request.config.skip_completed):
        _check_same_run(request)
    elif used:
        raise _fault(
            f"hydra.run.dir = {folder}: is not empty; two runs never share a folder "
            "(checkpoint.resume=auto continues the run in it)"
        )
    return resume_point(request)


def resume_point(request: Request) -> Path | None:
    """The path a run resumes from: its own folder if it has a checkpoint, else its origin.

    Raises:
        DataError: it does not exist, or no longer.
    """
    folder, resume = request.folder, request.config.checkpoint.resume
    if has_checkpoint(folder):
        return folder
    if not (folder / ORIGIN_FILE).exists():
        return None if resume in FROM_ITSELF else find(Path(resume)).absolute()
    origin = _read(folder / ORIGIN_FILE) or {}
    began = str(origin.get("checkpoint", f"what a damaged {ORIGIN_FILE} named"))
    if not (Path(began) / MANIFEST_FILE).is_file():
        raise DataError(
            f"hydra.run.dir = {folder}: this run started from the weights of {began} and has no "
            "checkpoint of its own; that one no longer exists, so it cannot resume"
        )
    return Path(began)


def with_base(request: Request) -> Request:
    """The run with the vocabularies that its rows are to be prepared with (`data.base`).

    A run that goes on keeps the vocabularies that it began with. A new one has those of the
    checkpoint that it starts from or, with the same rows as that, those of that run's `data.base`.
    Without `data.schema` it also has the widths of tables that the rows' own schema says.

    Raises:
        ConfigError: the model has no tables of several widths.
        DataError: the checkpoint is missing or damaged.
    """
    data = request.config.data
    if not isinstance(data, Table):
        return request
    return with_widths_of_rows(request if data.base is not None else _with_new_base(request, data))


def with_widths_of_rows(request: Request) -> Request:
    """The run with the widths of tables that its rows' own schema says, without `data.schema`.

    Raises:
        ConfigError: the model has no tables of several widths.
    """
    data = request.config.data
    if not isinstance(data, Table) or data.schema is not None:
        return request
    try:
        schema = build.schema(request.config)
    except (ConfigError, DataError):  # who opens the rows says it
        return request
    values, faults = with_table_dims(request.values, schema)
    if faults:
        raise ConfigError(faults_text(faults))
    is_same = values == request.values
    return request if is_same else replace(request, config=validate(values), values=values)


def _with_new_base(request: Request, data: Table) -> Request:
    values = request.values
    saved = _read(request.folder / CONFIG_FILE)
    folder = request.folder.absolute()
    base = _new_base(request) if saved is None else _recorded_base(saved, folder)
    if base is None:
        return request
    config = replace(request.config, data=replace(data, base=base))
    return replace(request, config=config, values=with_value(values, BASE, base))


def _recorded_base(values: Mapping[str, Any], folder: Path) -> str | None:
    """The `data.base` of a run's rows; if it is gone, `folder`, the run or checkpoint of them."""
    base = flat(values).get(BASE)
    is_gone = isinstance(base, str) and not Path(base).exists()
    return str(folder) if is_gone and (folder / PREPROCESSING_FOLDER).is_dir() else base


def _new_base(request: Request) -> str | None:
    resume = request.config.checkpoint.resume
    return None if resume in FROM_ITSELF else base_of(request.config, find(Path(resume)))


def base_of(config: Config, checkpoint: Path) -> str | None:
    """The `data.base` of raw rows for a checkpoint's model; None for vocabularies of their own.

    Raises:
        DataError: the checkpoint is damaged.
    """
    if config.data.raw is None:
        return None
    checkpoint = checkpoint.absolute()
    if not (checkpoint / PREPROCESSING_FOLDER).is_dir():  # of a program's own batches
        return None
    rows = read_kept(checkpoint).manifest
    if rows.schema.format != "table":
        return None
    now = rows.semantics if config.data.schema is None else build.semantics(config)
    if look_like(build.raw_paths(config), rows.sources) and not rows.semantics.differences(now):
        return _recorded_base(read_facts(checkpoint)["config"], checkpoint)
    return str(checkpoint)


def check_checkpoint(
    folder: Path, values: Mapping[str, Any], shards: Shards | None, new_run: bool
) -> Mapping[str, Any]:
    """Check that a run may resume from a checkpoint; returns the checkpoint's facts.

    Args:
        folder: folder of the checkpoint.
        values: the run's configuration.
        shards: the run's rows; None if not prepared yet.
        new_run: whether the checkpoint is another run's.

    Raises:
        DataError: its model or rows differ; names each key.
    """
    facts = read_facts(folder)
    saved = own_values(folder / MANIFEST_FILE, facts["config"])
    lines = differences(saved, absolute(values), new_run=new_run)
    if shards is not None:
        fault = _rows_fault(facts, shards.manifest, values["data"]["name"], new_run)
        lines += [f"data.prepared = {shards.folder}: {fault}"] if fault else []
    _refuse(folder, lines)
    return {**facts, "config": saved}


def begun_anew(
    folder: Path, facts: Mapping[str, Any], values: Mapping[str, Any], *, same_rows: bool = True
) -> str | None:
    """Say what state in a checkpoint with these facts a run drops; None if it goes on with all."""
    kept = kept_groups(facts["config"], absolute(values), same_rows=same_rows)
    dropped = {tensor["group"] for tensor in facts["tensors"].values()} - kept
    state = ", ".join(text for group, text in STATE.items() if group in dropped)
    return f"weights and optimizers of {folder} go on; {state} begin anew" if state else None


def _rows_fault(facts: Mapping[str, Any], rows: Manifest, data: str, new_run: bool) -> str | None:
    """The reason why a run cannot go on from a checkpoint with these rows; None if it can."""
    if has_rows(facts, rows):
        is_same = facts.get("vocabulary") == rows.meaning
        return None if is_same else "its ids are of other categories or columns"
    if not new_run:
        return "the checkpoint was made from other rows"
    if data != "table":
        return (
            "the checkpoint was made from other rows; only data=table goes on with those of "
            f"another day: with data={data} name the checkpoint's own (data.raw or data.prepared), "
            "or train from nothing, without checkpoint.resume"
        )
    if not rows.begins_with(facts.get("vocabulary") or {}):
        return (
            "the checkpoint was made from other rows, and these were prepared without its "
            "vocabularies; data.raw=FILES, without data.prepared, prepares them with these"
        )
    return None


def has_rows(facts: Mapping[str, Any], rows: Manifest) -> bool:
    """Whether a checkpoint with these facts was made from these rows, not from earlier ones."""
    return facts["rows"] == rows.identity


def check_weights(folder: Path, values: Mapping[str, Any], new_run: bool) -> Mapping[str, Any]:
    """Check a checkpoint as `check_checkpoint`, without rows, if a program hands batches over."""
    facts = read_facts(folder)
    saved = own_values(folder / MANIFEST_FILE, facts["config"])
    name = {"name": values["model"]["name"]}  # a file in conf/, which it need not come from
    saved = {**saved, "data": values["data"], "model": {**saved["model"], **name}}
    _refuse(folder, differences(saved, values, new_run=new_run))
    return {**facts, "config": saved}


def _refuse(folder: Path, lines: Sequence[str]) -> None:
    if lines:
        raise DataError(
            f"{folder}: cannot resume from this checkpoint\n" + "\n".join(f"  {x}" for x in lines)
        )


def tell_start(request: Request, resume_from: Path | None, say: Callable[[str], None]) -> None:
    """Report where a run is, and what it begins with if the command line might mean otherwise."""
    folder, resume = request.folder, request.config.checkpoint.resume
    say(f"run folder {folder}")
    if resume_from is not None and resume_from != folder:
        say(f"starting from the weights of {resume_from}")
    elif resume_from is not None and resume == "auto":
        say(f"checkpoint.resume=auto: going on with the run in {folder}, as configured there")
        if names := ", ".join(path.name for path in later(folder)):
            say(f"the first checkpoint that is saved now replaces those of later steps: {names}")
    elif resume == "auto":
        say(f"checkpoint.resume=auto: no checkpoint in {folder} yet; starting at step 0")


def is_complete(request: Request) -> bool:
    """Whether the folder holds this same run, complete."""
    saved, summary = _read(request.folder / CONFIG_FILE), _read(request.folder / SUMMARY_FILE)
    return (
        saved is not None
        and summary is not None
        and summary.get("status") == COMPLETE
        and same_results(saved, absolute(request.values))
    )


def write_facts(request: Request, rows: Path) -> None:
    """Write `config.json` and the other files of a run's start; `origin.json` for a new run.

    From now until the end of this attempt there is no summary.

    Args:
        request: the run.
        rows: the folder of its prepared rows, whose preprocessing it keeps.
    """
    folder = request.folder
    environment = {**asdict(describe()), "command": [Path(sys.argv[0]).name, *sys.argv[1:]]}
    texts = [*_earlier_overrides(request), *request.overrides]
    overrides = "".join(f"- {json.dumps(override)}\n" for override in texts)
    began = resume_point(request)
    if began is not None and began != folder:
        origin = {"checkpoint": str(began), ANCESTORS: [*_ancestors(began), str(began)]}
        write_whole(folder / ORIGIN_FILE, json.dumps(origin))
    write_whole(folder / CONFIG_FILE, json.dumps(recorded(request.values, rows), indent=1))
    write_whole(folder / OVERRIDES_FILE, overrides or "[]\n")
    write_whole(folder / ENVIRONMENT_FILE, json.dumps(environment, indent=1))
    with writing(folder / PREPROCESSING_FOLDER, RUN_FOLDER_KEY):
        keep(rows, folder)
    note_run(rows, folder)
    (folder / SUMMARY_FILE).unlink(missing_ok=True)  # that of an earlier attempt


def _ancestors(checkpoint: Path) -> list[str]:
    """The checkpoints that a checkpoint's run began from, oldest first, as far as it says."""
    with suppress(DataError):
        origin = _read(checkpoint.parent.parent / ORIGIN_FILE) or {}
        return [str(path) for path in origin.get(ANCESTORS, [])]
    return []


def _earlier_overrides(request: Request) -> list[str]:
    """Overrides of the run's earlier starts, without keys that are set anew."""
    path = request.folder / OVERRIDES_FILE
    if request.config.checkpoint.resume != "auto" or not path.exists():
        return []
    typed = {*map(head_of, request.overrides)}
    earlier = read_overrides(path)
    return [text for text in earlier if head_of(text) not in typed]


def read_overrides(path: Path) -> list[str]:
    """Read the overrides recorded in a run folder: a YAML list of quoted texts, one a line.

    Raises:
        DataError: the file is not as the program writes it.
    """
    text = read_text(path.parent, path.name, MOST_JSON_BYTES)
    try:
        return [str(from_json(line[2:])) for line in text.splitlines() if line.startswith("- ")]
    except ValueError as error:
        raise DataError(f"{path}: is not the list that the program wrote: {error}") from None


def attempts(folder: Path) -> int:
    """Number of earlier starts of the run in this folder, as far as recorded.

    Raises:
        DataError: a line of the record is not an event; names file and line.
    """
    path = folder / EVENTS_FILE
    record = events.read(path) if path.exists() else ()
    starts = (event.values["attempt"] for event in record if event.kind is events.Kind.STARTED)
    return max(starts, default=-1) + 1


def append_events(folder: Path, reported: Sequence[events.Event]) -> None:
    """Record the events that ranks reported at their end."""
    path, text = folder / EVENTS_FILE, "".join(f"{event.to_json()}\n" for event in reported)
    if reported:
        with writing(path, RUN_FOLDER_KEY), path.open("ab", buffering=0) as file:
            append(file.fileno(), text.encode())


def write_summary(
    folder: Path,
    status: str,
    cores: int,
    teacher: Any,
    latency: Any,
    best: tuple[int, Score] | None = None,
    rows: Manifest | None = None,
) -> dict[str, Any]:
    """Write `summary.json` from the events so far; returns it.

    Args:
        folder: folder of the run.
        status: how the run ended.
        cores: number of cores of the machine.
        teacher: scores of the teacher model of synthetic rows, else None.
        latency: figures of emulated latency since the last start; else None.
        best: step and score of the best checkpoint, if the run had evaluations before its end.
        rows: the rows that it was trained on, if it came to its end.
    """
    path = folder / EVENTS_FILE
    summary = summarise(events.read(path) if path.exists() else [], status, cores)
    summary["test"]["best_reachable"] = teacher
    summary["network"]["latency"] = latency
    summary["best"] = None if best is None else {"step": best[0], **asdict(best[1])}
    origin = _read(folder / ORIGIN_FILE) or {}
    summary["descends_from"] = origin.get(ANCESTORS)
    summary["growth"] = None if rows is None else _growth(rows)
    write_whole(folder / SUMMARY_FILE, json.dumps(summary, indent=1))
    return summary


def _growth(rows: Manifest) -> dict[str, Any] | None:
    """By table the number of its rows, and how many categories gave it them."""
    if rows.base is None:
        return None
    schema = rows.schema
    sizes, growth = schema.by_table(rows.table_rows), schema.by_table(rows.base.growth)
    tables = zip(schema.table_names, sizes, growth, strict=True)
    return {name: {"rows": count, **asdict(one)} for name, count, one in tables}


def _check_same_run(request: Request) -> None:
    folder = request.folder
    values = _read(folder / CONFIG_FILE)
    if values is None:
        raise _fault(f"hydra.run.dir = {folder}: is not empty and holds no run to resume")
    now = absolute(request.values)
    if config_hash(values) != config_hash(now):
        raise ConfigError(faults_text(differences(values, now, new_run=False)))
    summary = _read(folder / SUMMARY_FILE)
    if summary is not None and summary.get("status") == COMPLETE:
        raise _fault(f"hydra.run.dir = {folder}: this run is complete; choose another folder")
    _check_rows(request, values)


def _check_rows(request: Request, saved: Mapping[str, Any]) -> None:
    """Refuse rows of other files, or of another directory, unless they are named."""
    before, now = saved["data"]["prepared"], request.config.data.prepared
    if now is None and before not in (None, full(build.prepared_folder(request.config))):
        raise _fault(elsewhere(ROWS, str(before), now))


def _fault(text: str) -> ConfigError:
    return ConfigError(faults_text([text]))


def _read(path: Path) -> Mapping[str, Any] | None:
    return read_object(path.parent, path.name) if path.exists() else None


def output_file(name: str, key: str) -> Path:
    """The path of a file that a command is to make or replace.

    Args:
        name: name of the file.
        key: configuration key of the name.

    Raises:
        ConfigError: it is not a file's name, or that of a folder, device, pipe or link.
    """
    path = Path(name)
    if not path.name:
        raise _fault(f"{key} = {name}: not the name of a file")
    if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
        raise _fault(f"{key} = {name}: is there, and no plain file; only such a one is replaced")
    return path


def write_whole(path: Path, text: str, key: str = RUN_FOLDER_KEY) -> None:
    """Write a file as a whole: on failure it stays as it was.

    Args:
        path: path of the file.
        text: the whole contents.
        key: configuration key of its folder.

    Raises:
        ResourceError: it cannot be written.
    """
    with writing(path, key):
        replace_text(path, text)
