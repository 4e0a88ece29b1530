"""A run that follows a folder: each file that appears in it is scored, then learned.

    files/000003-day8/        the run of the third file, which goes on from that of the second
    files/000003-day8/rows/   its prepared rows, until they are learned
    summary.json              what became of each file, with its scores before it was learned

The run of a file is an ordinary one. That it is complete says that its file is learned, so that a
run that was killed goes on in the last one, learns no file twice and loses none.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, final

from dlrm_hybrid.checkpoint.folder import CHECKPOINTS, FILES
from dlrm_hybrid.config.choices import Table
from dlrm_hybrid.config.identity import CONFIG_FILE, flat, with_value
from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.validate import faults_text, validate
from dlrm_hybrid.data.manifest import MANIFEST_FILE, FileStamp, read, stamp
from dlrm_hybrid.data.preprocessing import PREPROCESSING_FOLDER, read_kept
from dlrm_hybrid.disk import RUN_FOLDER_KEY, read_object, writing
from dlrm_hybrid.run import folder as run_folder
from dlrm_hybrid.run.display import Display, TrainingView
from dlrm_hybrid.run.readiness import no_empty_folder
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.supervisor import Forwarder
from dlrm_hybrid.run.training import train
from dlrm_hybrid.telemetry.summary import COMPLETE, SUMMARY_FILE
from dlrm_hybrid.types import (
    ConfigError,
    DataError,
    ExitCode,
    InterruptedRunError,
    PreemptedError,
    StoppedLateError,
)

ROWS = "rows"
HIDDEN = (".", "_")
UNFINISHED = (".tmp", ".part")  # names of files that are being written
POLL_SECONDS = 0.5
MOST_STEM = 40  # most characters of a file's name in that of its run
FIGURES = (
    *("loss", "auc", "gauc", "accuracy", "normalized_entropy", "base_rate", "calibration"),
    "labels",
)

Values = Mapping[str, Any]
Publish = Callable[[Path], None]
"""Called with the folder of each run that is complete, also again when this program starts."""


@final
@dataclass(frozen=True, slots=True)
class FileRun:
    """The run of one file; `folder` is that of the run."""

    folder: Path

    @property
    def file(self) -> Path:
        """The file that it learns."""
        return Path(flat(read_object(self.folder, CONFIG_FILE))["data.raw"])

    @property
    def is_complete(self) -> bool:
        """Whether it has learned its file."""
        if not (self.folder / SUMMARY_FILE).exists():
            return False
        return read_object(self.folder, SUMMARY_FILE).get("status") == COMPLETE

    @property
    def has_begun(self) -> bool:
        """Whether its rows are prepared, so that it goes on with this file alone."""
        return (self.folder / CONFIG_FILE).exists()

    def entry(self) -> dict[str, Any]:
        """The facts of its file, its rows and scores, for `summary.json`."""
        summary = read_object(self.folder, SUMMARY_FILE)
        is_kept = (self.folder / PREPROCESSING_FOLDER).is_dir()
        rows = read_kept(self.folder).manifest if is_kept else None
        growth: Mapping[str, Mapping[str, int]] = summary["growth"] or {}
        test: Values = summary["test"]
        return {
            "file": self.file.name,
            "run": f"{FILES}/{self.folder.name}",
            "rows": rows and rows.rows,
            "samples": summary["samples"],
            **{name: test[name] for name in FIGURES if name in test},
            "appended": sum(column["appended"] for column in growth.values()),
            "stamp": rows and asdict(rows.sources[0].stamp),
        }


def follow(
    request: Request, display: Display, view: TrainingView, publish: Publish | None = None
) -> int:
    """Learn the files of `data.follow` as they appear, until a key or a signal ends it.

    Args:
        request: the run; its folder may be that of an earlier start, with which it goes on.
        display: for all but training.
        view: for the ranks' events, and the result of each file.
        publish: called after each file.

    Returns:
        The exit code.

    Raises:
        DlrmError: a file cannot be learned, or a signal came; the same command goes on.
    """
    folder = request.folder
    with no_empty_folder(folder), run_folder.one_run(folder):
        _require_own(folder)
        followed = _Followed(request, display, view, publish)
        try:
            followed.run()
        finally:
            followed.clean()
    return ExitCode.DONE


def is_final(name: str) -> bool:
    """Whether a file of this name is there as a whole."""
    return not name.startswith(HIDDEN) and not name.endswith(UNFINISHED)


@final
@dataclass(slots=True)
class _Followed:
    """The runs of all files so far, and the loop that adds to them; see `follow`."""

    request: Request
    display: Display
    view: TrainingView
    publish: Publish | None
    entries: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    @property
    def data(self) -> Table:
        """The keys of the rows."""
        assert isinstance(self.request.config.data, Table)
        return self.request.config.data

    @property
    def again(self) -> tuple[str, ...]:
        """The overrides of the command that goes on with this run."""
        kept = (text for text in self.request.overrides if head_of(text) != RUN_FOLDER_KEY)
        return (*kept, override_text(RUN_FOLDER_KEY, str(self.request.folder)))

    def runs(self) -> list[FileRun]:
        """The runs that have begun, in order."""
        folders = sorted((self.request.folder / FILES).glob("[0-9]*-*"))
        return [run for run in map(FileRun, folders) if run.has_begun]

    def run(self) -> None:
        """Learn files as they appear, until a key or a signal ends it."""
        self.clean()
        runs = self.runs()
        if runs and not runs[-1].is_complete:
            _require_unchanged(runs[-1])
            self._learn(runs[-1].file, runs)
        elif runs:
            self._finish(runs)
        self._tell_changed()
        most = self.data.follow_files
        while most is None or len(runs) < most:
            file = self._next(runs)
            if file is None:
                break
            name = f"{len(runs) + 1:06d}-{file.name.partition('.')[0][:MOST_STEM]}"
            runs.append(FileRun(self.request.folder / FILES / name))
            self._learn(file, runs)
        self.display.line(f"{len(runs):,} files are learned, {self.request.folder}")

    def clean(self) -> None:
        """Remove runs of files that were killed before their rows were prepared."""
        for folder in (self.request.folder / FILES).glob("[0-9]*-*"):
            if not FileRun(folder).has_begun:
                shutil.rmtree(folder)
        if not any(run.has_begun for run in self.runs()):
            shutil.rmtree(self.request.folder / FILES, ignore_errors=True)

    def _learn(self, file: Path, runs: Sequence[FileRun]) -> None:
        """Make the last of these runs complete, and note what became of its file."""
        self.display.line(f"file {len(runs):,}: {file}")
        stopped: StoppedLateError | None = None
        try:
            train(self._file_request(file, runs), self.display, self.view)
        except StoppedLateError as error:
            stopped = error
        self._finish(runs)
        if stopped is not None:
            self._stop(stopped.number)

    def _file_request(self, file: Path, runs: Sequence[FileRun]) -> Request:
        """The run that learns a file, the last of these."""
        run, before = runs[-1], runs[:-1]
        keys: dict[str, Any] = {
            "data.follow": None,
            "data.follow_files": None,
            "data.follow_idle_seconds": None,
            "data.progressive": True,
            "data.raw": str(file.absolute()),
            "data.prepared": str(run.folder / ROWS),
        }
        if before:
            keys["data.base"] = None  # that of the checkpoint
            keys["checkpoint.resume"] = str(before[-1].folder)
        if run.has_begun or self.request.config.checkpoint.resume == "auto":
            keys["checkpoint.resume"] = "auto"
        values, overrides = dict(self.request.values), list(self.request.overrides)
        overrides = [text for text in overrides if head_of(text) not in keys]
        for key, value in keys.items():
            values = with_value(values, key, value)
            if value is not None:
                overrides.append(f"{key}=true" if value is True else override_text(key, value))
        return replace(
            self.request,
            config=validate(values),
            values=values,
            folder=run.folder,
            overrides=tuple(overrides),
            again=self.again,
        )

    def _finish(self, runs: Sequence[FileRun]) -> None:
        """Note what became of files, publish the last run, and remove what nobody needs."""
        noted = self._noted()
        names = [f"{FILES}/{run.folder.name}" for run in runs]
        self.entries = [
            noted[name] if name in noted else run.entry()
            for name, run in zip(names, runs, strict=True)
        ]
        if self.publish is not None:
            self.publish(runs[-1].folder)
        text = json.dumps({"files": self.entries}, indent=1)
        run_folder.write_whole(self.request.folder / SUMMARY_FILE, text)
        keep = self.request.config.checkpoint.keep
        with writing(self.request.folder, RUN_FOLDER_KEY):
            for number, run in enumerate(reversed(runs)):
                shutil.rmtree(run.folder / ROWS, ignore_errors=True)
                if number >= keep:
                    for name in (CHECKPOINTS, PREPROCESSING_FOLDER):
                        shutil.rmtree(run.folder / name, ignore_errors=True)

    def _noted(self) -> dict[str, dict[str, Any]]:
        """Entries of files that an earlier start has noted, by the folders of their runs."""
        if not (self.request.folder / SUMMARY_FILE).exists():
            return {}
        summary = read_object(self.request.folder, SUMMARY_FILE)
        return {entry["run"]: entry for entry in summary["files"]}

    def _next(self, runs: Sequence[FileRun]) -> Path | None:
        """Wait for the next file; None if the run ends here."""
        most = self.data.follow_idle_seconds
        since, is_waiting = time.monotonic(), False
        with Forwarder.installed() as forwarder:
            while not forwarder.received:
                names = self._names()
                later = [name for name in names if not runs or name > runs[-1].file.name]
                self._tell_passed(names, later)
                if later:
                    return self._folder / later[0]
                idle = time.monotonic() - since
                if most is not None and idle >= most:
                    return None
                if not is_waiting:
                    self.display.line(f"waiting for files in {self._folder}")
                is_waiting = True
                time.sleep(POLL_SECONDS if most is None else min(POLL_SECONDS, most - idle))
        self._stop(forwarder.received[0])
        raise AssertionError("a signal ends the run")

    @property
    def _folder(self) -> Path:
        return Path(self.data.follow or "")

    def _names(self) -> list[str]:
        try:
            with os.scandir(self._folder) as listing:
                return sorted(f.name for f in listing if is_final(f.name) and f.is_file())
        except OSError as error:
            fault = f"data.follow = {self._folder}: {error.strerror}"
            raise ConfigError(faults_text([fault])) from error

    def _tell_passed(self, names: Sequence[str], later: Sequence[str]) -> None:
        learned = {entry["file"] for entry in self.entries}
        for name in names[: len(names) - len(later)]:
            if name not in learned:
                path = self._folder / name
                self.display.line_once(
                    f"{path}: is passed over: files whose names sort behind it are learned"
                )

    def _tell_changed(self) -> None:
        for entry in self.entries:
            path = self._folder / entry["file"]
            before = entry["stamp"] and FileStamp(**entry["stamp"])
            if before and path.is_file() and _has_changed(path, before):
                self.display.line_once(
                    f"{path}: has changed since it was learned, and is not learned again; rows "
                    "are new under a new name"
                )

    def _stop(self, number: int) -> None:
        kind = InterruptedRunError if number == signal.SIGINT else PreemptedError
        raise kind(
            f"stopped by {signal.Signals(number).name}; {len(self.entries):,} files are learned; "
            f"resume with\n  python -m dlrm_hybrid train {shlex.join(self.again)}"
        )


def _has_changed(path: Path, before: FileStamp) -> bool:
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) == (before.num_bytes, before.mtime_ns):
        return False
    return stamp(path).sample_xxh3 != before.sample_xxh3


def _require_unchanged(begun: FileRun) -> None:
    """Refuse to go on with a file that has changed since its run began."""
    rows = begun.folder / ROWS
    sources = read(rows).sources if (rows / MANIFEST_FILE).exists() else ()
    if begun.file.is_file() and any(_has_changed(begun.file, source.stamp) for source in sources):
        raise DataError(
            f"{begun.file}: has changed since the run that learns it began; put it back as it was, "
            f"or take it away (the run goes on with {rows}) and bring its new rows under a later "
            "name"
        )


def _require_own(folder: Path) -> None:
    """Refuse a folder with anything but earlier starts of a run that follows."""
    names = {p.name for p in folder.iterdir()} - {run_folder.LOCK_FILE, run_folder.OUTPUT_FILE}
    if names and FILES not in names:
        fault = f"hydra.run.dir = {folder}: is not empty, and holds no run that follows a folder"
        raise ConfigError(faults_text([fault]))
