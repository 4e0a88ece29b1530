"""Prepared rows: found in their folder, or prepared there from raw files or a generator."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dlrm_hybrid.config.choices import Synthetic
from dlrm_hybrid.config.keys import head_of
from dlrm_hybrid.config.model import NO_SCHEMA
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.data import folder as folders
from dlrm_hybrid.data.folder import Generated, Raw
from dlrm_hybrid.data.manifest import MANIFEST_FILE, Growth, Manifest, stamp
from dlrm_hybrid.data.manifest import read as read_manifest
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.display import Display
from dlrm_hybrid.types import ConfigError, DataError

if TYPE_CHECKING:
    from dlrm_hybrid.data.prepare import PrepareResult

UNITS = {
    "parse": "bytes",
    "read": "rows",
    "assemble": "rows",
}  # of the stages of `prepare`; others: values
MOST_COLUMNS = 5  # in a line


@dataclass(frozen=True, slots=True)
class Command:
    """A command as typed, for messages that say what to type instead."""

    verb: str
    overrides: Sequence[str]

    def with_(self, *more: str) -> str:
        """Repeat the command with other values of some keys."""
        keys = [*map(head_of, more)]
        overrides = [text for text in self.overrides if head_of(text) not in keys]
        return f"python -m dlrm_hybrid {self.verb} {shlex.join([*overrides, *more])}"


def prepared_rows(config: Config, display: Display, command: Command) -> Path:
    """Find the prepared rows of a configuration, or prepare missing ones; returns their folder.

    Args:
        config: decides the rows.
        display: for progress and remarks.
        command: the command as typed.

    Raises:
        DataError: there are no rows and no raw files, or they were made from something else.
    """
    folder, raw = build.prepared_folder(config), _raw(config, display)
    if raw and not _are_gone(raw, folder, display):
        _prepare(config, raw, command, display)
        return folder
    names = _raw_names(folder)
    raw_files = override_text("data.raw", names[0] if len(names) == 1 else names)
    fix = command.with_(raw_files, "prepare.overwrite=true")
    advice = f"to replace it, with data.raw naming the raw files:\n  {fix}"
    options = replace(build.prepare_options(config, advice), overwrite=False)
    if folders.current(folder, None, options, display.line) is None:
        example, kinds = _example(config)
        raise DataError(
            f"data.prepared = {folder}: no prepared rows here; name the raw file ({kinds}) to "
            f"prepare them first:\n  {command.with_(f'data.raw={example}')}"
        )
    return folder


def _example(config: Config) -> tuple[str, str]:
    """The name of a raw file, and of which kinds it may be."""
    if config.data.name == "table":
        return "rows.parquet", "CSV, Parquet or .npy"
    return "train.txt", "text, .gz or .zst"


def _raw(config: Config, display: Display) -> Raw:
    """The source of raw rows; empty if none are named."""
    if config.data.name == "synthetic":
        return Generated(build.synthetic_name(config), partial(_generate, config, display))
    return build.raw_paths(config)


def _are_gone(raw: Raw, folder: Path, display: Display) -> bool:
    """Whether raw files are gone, but there are rows prepared from files of these names."""
    if isinstance(raw, Generated) or all(path.exists() for path in raw):
        return False
    if _raw_names(folder) != [path.name for path in raw]:
        return False
    missing = next(path for path in raw if not path.exists())
    display.line(f"{missing}: no longer exists; using the rows prepared from it ({folder})")
    return True


def _raw_names(folder: Path) -> list[str]:
    """Names of the raw files that a folder was made from, as far as it says."""
    try:
        return [source.stamp.name for source in read_manifest(folder).sources]
    except DataError:
        return ["train.txt"]


def _generate(config: Config, display: Display, path: Path) -> None:
    from dlrm_hybrid.data.synthetic import generate  # numba takes a second

    data = config.data
    assert isinstance(data, Synthetic), data
    with display.counter("generate", "rows") as show:
        generate(path, data.rows, data.seed, build.profile(), lambda done: show(done, data.rows))


def prepare_rows(config: Config, display: Display, command: Command) -> Manifest | None:
    """Prepare the raw rows of this configuration, unless that has been done.

    Args:
        config: decides the rows, and how they are prepared.
        display: for progress and results.
        command: the command as typed.

    Returns:
        The manifest of rows that were there before; None if they were prepared now.

    Raises:
        ConfigError: no raw rows are named.
        DataError: they are missing or cannot be read.
    """
    raw = _raw(config, display)
    if not raw:
        example, kinds = _example(config)
        fault = f"data.raw = null: name the raw file, data.raw={example} ({kinds})"
        raise ConfigError(faults_text([fault]))
    is_there = (build.prepared_folder(config) / MANIFEST_FILE).is_file()  # and has a schema
    has_schema = config.data.schema is not None or config.data.base is not None or is_there
    if config.data.name == "table" and not has_schema:
        raise ConfigError(faults_text([NO_SCHEMA]))
    return _prepare(config, raw, command, display)


def _prepare(config: Config, raw: Raw, command: Command, display: Display) -> Manifest | None:
    folder = build.prepared_folder(config)
    fix = command.with_("prepare.overwrite=true")
    advice = f"name another folder with data.prepared, or replace it:\n  {fix}"
    options = build.prepare_options(config, advice)
    # Existing rows need neither numba nor a writable folder.
    current = folders.current(folder, raw, options, display.line)
    if isinstance(current, Manifest):
        return current
    if not isinstance(raw, Generated):
        for path in raw:
            stamp(path)  # refuses a missing one before numba is imported and a folder made
    from dlrm_hybrid.data.prepare import prepare

    files = "synthetic rows" if isinstance(raw, Generated) else ", ".join(map(str, raw))
    display.line(f"preparing {files} into {folder}")
    with display.counter("prepare", "values") as show:

        def report(stage: str, done: int, total: int | None) -> None:
            show(done, total, stage, UNITS.get(stage))

        result = prepare(raw, folder, options, report, display.line)
    if result.up_to_date:
        return result.manifest
    _show_prepared(result, folder, display)
    return None


def _show_prepared(result: PrepareResult, folder: Path, display: Display) -> None:
    manifest, schema = result.manifest, result.manifest.schema
    rows, clicks = manifest.rows, sum(part.clicks for part in manifest.parts)
    train, validation, test = (part.rows for part in manifest.parts)
    validated = f"{validation:,} to validate, " if validation else ""
    first = next(iter(manifest.schema.loss_weights), None)
    share = f"{clicks / rows:.2%} {'clicks' if first is None else f'with {first!r}'}"
    display.line(
        f"{folder}: {rows:,} rows ({train:,} to train, {validated}{test:,} to test), "
        f"{share}, {sum(schema.by_table(manifest.table_rows)):,} categories; "
        f"{result.seconds:.1f} s, {result.rows_per_second:,.0f} rows/s"
    )
    for file in manifest.vectors:
        column, count = manifest.schema.categorical[file.column], file.ids.rows
        display.line(
            f"  {column.name}: {count:,} of {manifest.table_rows[file.column]:,} rows begin with a "
            f"vector of {column.vectors}; {file.categories - count:,} of its categories have no row"
        )
    if manifest.base is not None:
        for line in _growth_lines(schema.table_names, schema.by_table(manifest.base.growth)):
            display.line(line)
    if manifest.bad_rows:
        display.line(f"  {manifest.bad_rows:,} bad rows were dropped (data.on_bad_row)")
    if manifest.zero_keys:
        display.line(
            f"  {manifest.zero_keys:,} fields contain 00000000 and share the id of missing values"
        )


def _growth_lines(names: Sequence[str], growth: Sequence[Growth]) -> Iterator[str]:
    """Lines with what became of the base's categories, and the columns with most new ones."""
    reused, appended, unknown, evicted = (
        sum(getattr(column, name) for column in growth)
        for name in ("reused", "appended", "unknown", "evicted")
    )
    yield (
        f"  of the categories in them the base has {reused:,}, {appended:,} are appended, "
        f"{unknown:,} stay unknown"
    )
    if evicted:
        yield f"  {evicted:,} others took the rows of those least in use (evict)"
    order = sorted(range(len(growth)), key=lambda index: -growth[index].appended)[:MOST_COLUMNS]
    most = [
        f"{names[index]} {growth[index].appended:,}" for index in order if growth[index].appended
    ]
    if len(growth) > 1 and most:
        yield f"  appended most: {', '.join(most)}"
