"""The verb `prepare`, and the preparing that `train` does for made-up rows."""

from __future__ import annotations

import time
from pathlib import Path

from dlrm_hybrid.cli.compiling import compile_for
from dlrm_hybrid.cli.request import Request
from dlrm_hybrid.cli.terminal import Bar, Terminal
from dlrm_hybrid.config import build
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.config.validate import faults_text
from dlrm_hybrid.data.manifest import MANIFEST_FILE, Manifest
from dlrm_hybrid.data.manifest import read as read_manifest
from dlrm_hybrid.data.parquet import export_parquet
from dlrm_hybrid.data.prepare import PrepareResult, prepare
from dlrm_hybrid.data.shards import open_shards
from dlrm_hybrid.data.synthetic import generate
from dlrm_hybrid.types import ConfigError, DataError, ExitCode

BYTES_PER_MB = 1e6


def run(request: Request) -> int:
    """Prepare raw rows and say what they are."""
    config, terminal = request.config, Terminal()
    compile_for(config, terminal, trains=False)
    folder = build.prepared_folder(config)
    if config.data.name == "synthetic":
        prepared_rows(config, terminal)
    else:
        _prepare(config, folder, terminal)
    if config.data.parquet is not None:
        _export(folder, Path(config.data.parquet), terminal)
    return ExitCode.DONE


def prepared_rows(config: Config, terminal: Terminal) -> Path:
    """The folder of prepared rows for this configuration; made-up rows are made if need be.

    Raises:
        DataError: real rows that nobody has prepared yet.
    """
    folder = build.prepared_folder(config)
    if (folder / MANIFEST_FILE).is_file():
        _refuse_other_rows(config, folder)
        return folder
    if config.data.name != "synthetic":
        raise DataError(
            f"data.prepared = {folder}: no prepared rows here; first run\n"
            f"  python -m dlrm_hybrid prepare data={config.data.name} data.raw=train.txt "
            f"data.prepared={folder}"
        )
    _generate(config, terminal)
    _prepare(config, folder, terminal)
    (raw,) = build.raw_paths(config)
    raw.unlink()  # the same bytes can be made again
    return folder


def _refuse_other_rows(config: Config, folder: Path) -> None:
    if config.data.name != "synthetic":
        return
    (wanted,) = build.raw_paths(config)
    made_from = [source.name for source in read_manifest(folder).sources]
    if made_from != [wanted.name]:
        raise DataError(
            f"data.prepared = {folder}: was made from {', '.join(made_from)}, the configuration "
            f"says {wanted.name}; name another folder"
        )


def _generate(config: Config, terminal: Terminal) -> None:
    (path,) = build.raw_paths(config)
    if path.exists():
        return
    rows, seed = config.data.rows, config.data.seed
    assert rows is not None and seed is not None
    with terminal.bar("generate") as bar:
        start = time.perf_counter()
        generate(
            path,
            rows,
            seed,
            build.profile(),
            lambda done: bar.update(done, rows, _rate(done, start, "rows", 1)),
        )


def _prepare(config: Config, folder: Path, terminal: Terminal) -> None:
    raw = build.raw_paths(config)
    if not raw:
        fault = "data.raw = null: name the raw file, data.raw=train.txt (or .gz, .zst)"
        raise ConfigError(faults_text([fault]))
    with terminal.bar("prepare") as bar:
        result = prepare(raw, folder, build.prepare_options(config), _Stages(bar))
    _tell(result, folder, terminal)


class _Stages:
    """Shows the stages of `prepare` one after the other on one bar."""

    def __init__(self, bar: Bar) -> None:
        self._bar = bar
        self._stage = ""
        self._start = 0.0

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self._stage, self._start = stage, time.perf_counter()
        if stage == "parse":
            rate = _rate(done / BYTES_PER_MB, self._start, "MB", 0)
        else:
            rate = _rate(done, self._start, "rows" if stage == "assemble" else "values", 0)
        self._bar.update(done, total, f"{stage}: {rate}")


def _tell(result: PrepareResult, folder: Path, terminal: Terminal) -> None:
    manifest = result.manifest
    if result.up_to_date:
        terminal.line(f"{folder} is up to date: {manifest.rows:,} rows")
        return
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
        remarks.append(f"  {manifest.bad_rows:,} bad rows were left out (data.on_bad_row)")
    if manifest.zero_keys:
        remarks.append(
            f"  {manifest.zero_keys:,} fields hold 00000000 and share the id of a missing value"
        )
    return remarks


def _export(folder: Path, target: Path, terminal: Terminal) -> None:
    shards = open_shards(folder, expected=None)
    rows = shards.manifest.rows
    with terminal.bar("parquet") as bar:
        start = time.perf_counter()
        files = export_parquet(
            shards, target, lambda done: bar.update(done, rows, _rate(done, start, "rows", 1))
        )
    terminal.line(f"{target}: {len(files)} Parquet files, {rows:,} rows")


def _rate(done: float, start: float, unit: str, digits: int) -> str:
    seconds = time.perf_counter() - start
    rate = done / seconds if seconds > 0 else 0.0
    return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:,.{digits}f} {unit}/s"
