"""The verb `prepare`: prepares raw rows, checks prepared ones, or guesses a schema."""

from __future__ import annotations

import shlex
from pathlib import Path

from dlrm_hybrid.cli.terminal import Terminal
from dlrm_hybrid.config.overrides import override_text
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.manifest import file_xxh3
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.data.sources.paths import find
from dlrm_hybrid.data.sources.raw import BadRowPolicy
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.request import Request
from dlrm_hybrid.run.rows import Command, prepare_rows
from dlrm_hybrid.types import ConfigError, DataError, ExitCode, ResourceError


def run(request: Request) -> int:
    """Prepare raw rows, check prepared ones or guess a schema, as configured."""
    config, terminal = request.config, Terminal()
    if config.data.guess is not None:
        return _guess(config.data.guess, config, terminal)
    folder = build.prepared_folder(config)
    if config.prepare.check:
        return _check(config, folder, terminal)
    manifest = prepare_rows(config, terminal, Command("prepare", request.overrides))
    if manifest is not None:
        terminal.line(f"{folder} is up to date: {manifest.rows:,} rows")
    return ExitCode.DONE


def _guess(named: str | tuple[str, ...], config: Config, terminal: Terminal) -> int:
    """Write a schema guessed from the first of some files; never overwrites one."""
    from dlrm_hybrid.data.sources.guess import guess  # Arrow takes a while

    rows, *rest = find(named, "data.guess")
    target = Path(config.data.schema or f"{rows.name.partition('.')[0]}.yaml")
    on_bad_row = config.data.on_bad_row
    policy = BadRowPolicy(on_bad_row == "error", config.data.max_bad_rows)
    text, remarks = guess(rows, policy)
    try:
        with target.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(
            f"{target}: is there already and stays as it is; name another file with data.schema"
        ) from None
    except OSError as error:
        raise ResourceError(f"{target}: cannot be written: {error.strerror}") from error
    if rest:
        terminal.line(f"{rows}: the first of {1 + len(rest)} files, and the only one looked at")
    for remark in remarks:
        terminal.line(f"{rows}: {remark}")
    terminal.line(f"{target}: a first schema; edit it, then:")
    raw, schema = override_text("data.raw", named), override_text("data.schema", str(target))
    skip = [] if on_bad_row == "error" else [f"data.on_bad_row={on_bad_row}"]
    command = shlex.join(["prepare", "data=table", schema, raw, *skip])
    terminal.line(f"  python -m dlrm_hybrid {command}")
    return ExitCode.DONE


def _check(config: Config, folder: Path, terminal: Terminal) -> int:
    shards = open_shards(folder, build.semantics(config))
    rows = shards.manifest.rows
    with terminal.counter("check", "rows") as show:
        verify(shards, lambda done: show(done, rows))
    valid = f"{folder}: {rows:,} rows, all checksums and values are valid"
    raw = build.raw_paths(config)
    sources = shards.manifest.sources
    if raw and len(raw) != len(sources):
        raise DataError(f"data.raw: {len(raw)} files, {folder} was prepared from {len(sources)}")
    for path, source in zip(raw, sources if raw else (), strict=True):
        if file_xxh3(path) != source.xxh3:
            raise DataError(
                f"{path}: differs from the file that {folder} was prepared from (data.raw)"
            )
    terminal.line(f"{valid}; the raw files match" if raw else valid)
    return ExitCode.DONE
