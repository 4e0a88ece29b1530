"""The verb `prepare`, and the preparing that `train` does where rows are missing."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_hybrid.cli.figures import rate
from dlrm_hybrid.cli.terminal import Bar, Terminal
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.data import folder as folders
from dlrm_hybrid.data.folder import Generated, Raw
from dlrm_hybrid.data.manifest import Manifest, file_xxh3, stamp
from dlrm_hybrid.data.manifest import read as read_manifest
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.types import ConfigError, DataError, ExitCode

if TYPE_CHECKING:
    from dlrm_hybrid.data.prepare import PrepareResult


@dataclass(frozen=True, slots=True)
class Command:
    """What was typed, for messages that say what to type instead."""

    verb: str
    overrides: Sequence[str]

    def with_(self, *more: str) -> str:
        """The same command with other values of some keys."""
        keys = [text.partition("=")[0] for text in more]
        kept = [text for text in self.overrides if text.partition("=")[0] not in keys]
        return f"python -m dlrm_hybrid {self.verb} {shlex.join([*kept, *more])}"


def run(request: Request) -> int:
    """Prepare raw rows and say what they are, or check those that are there."""
    config, terminal = request.config, Terminal()
    folder = build.prepared_folder(config)
    if config.prepare.check:
        return _check(config, folder, terminal)
    raw = _raw(config, terminal)
    if not raw:
        fault = "data.raw = null: name the raw file, data.raw=train.txt (or .gz, .zst)"
        raise ConfigError(faults_text([fault]))
    found = _prepare(config, raw, Command("prepare", request.overrides), terminal)
    if found is not None:
        terminal.line(f"{folder} is up to date: {found.rows:,} rows")
    if config.data.parquet is not None:
        _export(folder, Path(config.data.parquet), terminal)
    return ExitCode.DONE


def prepared_rows(config: Config, terminal: Terminal, command: Command) -> Path:
    """The folder of prepared rows for this configuration, made where they are missing.

    Args:
        config: what the rows must be.
        terminal: for progress, and for what a person should know.
        command: what was typed.

    Raises:
        DataError: there are no rows and no raw files, or they were made from something else.
    """
    folder, raw = build.prepared_folder(config), _raw(config, terminal)
    if raw and not _are_gone(raw, folder, terminal):
        _prepare(config, raw, command, terminal)
        return folder
    fix = command.with_(_raw_override(_raw_names(folder)), "prepare.overwrite=true")
    advice = f"to replace it, with data.raw naming the raw files:\n  {fix}"
    options = replace(build.prepare_options(config, advice), overwrite=False)
    if folders.current(folder, None, options, terminal.line) is None:
        raise DataError(
            f"data.prepared = {folder}: no prepared rows here; name the raw file (train.txt, .gz "
            f"or .zst) to prepare them first:\n  {command.with_('data.raw=train.txt')}"
        )
    return folder


def _raw(config: Config, terminal: Terminal) -> Raw:
    """Where the raw rows come from; empty if nobody has said it."""
    if config.data.name == "synthetic":
        return Generated(build.synthetic_name(config), partial(_generate, config, terminal))
    return build.raw_paths(config)


def _are_gone(raw: Raw, folder: Path, terminal: Terminal) -> bool:
    """Whether raw files are not there any more, but the rows prepared from files of these names."""
    if isinstance(raw, Generated) or all(path.exists() for path in raw):
        return False
    if _raw_names(folder) != [path.name for path in raw]:
        return False
    missing = next(path for path in raw if not path.exists())
    terminal.line(f"{missing}: no longer exists; using the rows prepared from it ({folder})")
    return True


def _raw_names(folder: Path) -> list[str]:
    """The names of the raw files that a folder was made from, as far as it says."""
    try:
        return [source.stamp.name for source in read_manifest(folder).sources]
    except DataError:
        return ["train.txt"]


def _raw_override(names: Sequence[str]) -> str:
    return override_text("data.raw", names[0] if len(names) == 1 else names)


def _generate(config: Config, terminal: Terminal, path: Path) -> None:
    from dlrm_hybrid.data.synthetic import generate  # numba takes a second

    rows, seed = config.data.rows, config.data.seed
    assert rows is not None and seed is not None
    with terminal.counter("generate", "rows") as show:
        generate(path, rows, seed, build.profile(), lambda done: show(done, rows))


def _prepare(config: Config, raw: Raw, command: Command, terminal: Terminal) -> Manifest | None:
    """Prepare what is not there; returns what was there before."""
    folder = build.prepared_folder(config)
    fix = command.with_("prepare.overwrite=true")
    advice = f"name another folder with data.prepared, or replace it:\n  {fix}"
    options = build.prepare_options(config, advice)
    # Before numba is imported, and where nobody may write: what is there may do.
    found = folders.current(folder, raw, options, terminal.line)
    if isinstance(found, Manifest):
        return found
    if not isinstance(raw, Generated):
        for path in raw:
            stamp(path)  # one that is missing is told before numba is imported and a folder made
    from dlrm_hybrid.cli.compiling import compile_for
    from dlrm_hybrid.data.prepare import prepare

    compile_for(config, terminal, trains=command.verb != "prepare")

    files = "synthetic rows" if isinstance(raw, Generated) else ", ".join(map(str, raw))
    terminal.line(f"preparing {files} into {folder}")
    with terminal.bar("prepare") as bar:
        result = prepare(raw, folder, options, _Stages(bar), terminal.line)
    if result.up_to_date:
        return result.manifest
    _tell(result, folder, terminal)
    return None


def _check(config: Config, folder: Path, terminal: Terminal) -> int:
    """Read everything that was prepared, and the raw files where they are named."""
    shards = open_shards(folder, build.semantics(config))
    rows = shards.manifest.rows
    with terminal.counter("check", "rows") as show:
        verify(shards, lambda done: show(done, rows))
    told = f"{folder}: {rows:,} rows, all checksums and values are valid"
    raw = build.raw_paths(config)
    sources = shards.manifest.sources
    if raw and len(raw) != len(sources):
        raise DataError(f"data.raw: {len(raw)} files, {folder} was prepared from {len(sources)}")
    for path, source in zip(raw, sources if raw else (), strict=True):
        if file_xxh3(path) != source.xxh3:
            raise DataError(
                f"{path}: differs from the file that {folder} was prepared from (data.raw)"
            )
    terminal.line(f"{told}; the raw files match" if raw else told)
    return ExitCode.DONE


class _Stages:
    """Shows the stages of `prepare` one after the other on one bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._stage = ""
        self._start = 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self._stage, self._start = stage, time.perf_counter()
        unit = {"parse": "bytes", "assemble": "rows"}.get(stage, "values")
        speed = rate(done, time.perf_counter() - self._start, unit)
        self._bar.update(done, total, f"{stage}: {speed}")


def _tell(result: PrepareResult, folder: Path, terminal: Terminal) -> None:
    manifest = result.manifest
    rows, clicks = manifest.rows, sum(day.clicks for day in manifest.days)
    terminal.line(
        f"{folder}: {rows:,} rows in {len(manifest.days)} days, {clicks / rows:.2%} clicks, "
        f"{sum(manifest.table_rows):,} categories; "
        f"{result.seconds:.1f} s, {result.rows_per_second:,.0f} rows/s"
    )
    for line in _remarks(manifest):
        terminal.line(line)


def _remarks(manifest: Manifest) -> list[str]:
    remarks: list[str] = []
    if manifest.bad_rows:
        remarks.append(f"  {manifest.bad_rows:,} bad rows were dropped (data.on_bad_row)")
    if manifest.zero_keys:
        remarks.append(
            f"  {manifest.zero_keys:,} fields contain 00000000 and share the id of missing values"
        )
    return remarks


def _export(folder: Path, target: Path, terminal: Terminal) -> None:
    from dlrm_hybrid.data.shards import export_parquet

    shards = open_shards(folder, expected=None)
    rows = shards.manifest.rows
    with terminal.counter("parquet", "rows") as show:
        files = export_parquet(shards, target, lambda done: show(done, rows))
    terminal.line(f"{target}: {len(files)} Parquet files, {rows:,} rows")
