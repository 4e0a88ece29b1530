"""Raw Criteo rows to shards: parse, number the categories, put the records together.

    raw files ──parse──▶ spilled columns ──vocabulary──▶ ids in their place ──assemble──▶ shards

Everything is made in `<output>.partial` and renamed at the end; the manifest is the last file. The
result depends on the raw bytes and `Semantics` only, on no block size and no number of processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from dlrm_hybrid.data import folder, manifest, reader
from dlrm_hybrid.data.assemble import assemble_days
from dlrm_hybrid.data.format import NUM_CATEGORICAL, RECORD_BYTES
from dlrm_hybrid.data.ingest import BadRowPolicy, Ingested, ingest
from dlrm_hybrid.data.manifest import Manifest, Semantics, SourceFile
from dlrm_hybrid.data.spill import cut
from dlrm_hybrid.data.vocabulary import number_columns, shares_id
from dlrm_hybrid.data.workers import Workers
from dlrm_hybrid.types import ConfigError, DataError

QUARANTINE_FILE = "bad_rows.txt"
_SPILL_AND_SHARD_BYTES = 2 * RECORD_BYTES
_SPACE_MARGIN = 1.05
_CHOICES = {
    "day_split": ("equal_rows", "files"),
    "vocabulary": ("all_days", "train_days"),
    "on_bad_row": ("error", "skip", "quarantine"),
}

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, what is done and the total: bytes of the raw files for `parse`, columns ×
rows for `vocabulary`, rows for `assemble`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareOptions:
    """How to prepare.

    Attributes:
        semantics: what the rows mean.
        max_bad_rows: bad rows to leave out at most, unless each is an error.
        processes: workers; 1 runs everything in the caller's process.
        block_bytes: text parsed at a time.
    """

    semantics: Semantics
    max_bad_rows: int
    processes: int
    block_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """What is there now; `rows_per_second` is 0 when it was up to date already."""

    manifest: Manifest
    up_to_date: bool
    seconds: float
    rows_per_second: float


def prepare(
    raw: Sequence[Path],
    output: Path,
    options: PrepareOptions,
    progress: Progress,
) -> PrepareResult:
    """Turn raw files into a folder of shards, or find that they are there already.

    Raises:
        ConfigError: the days do not fit the files.
        DataError: a bad row, a damaged file, or an output made from something else.
        ResourceError: no room, no right to write, another prepare at work, or a killed worker.
    """
    started = time.perf_counter()
    _check(raw, options)
    sources = tuple(reader.describe(path) for path in raw)
    request = folder.Request(options.semantics, sources)
    found = folder.current(output, request)
    if found is None:
        with folder.disk_errors(output), folder.partial(output) as partial:
            found = folder.current(output, request)  # another prepare may just have made it
            if found is None:
                made = _make(raw, request, partial, options, progress)
                seconds = time.perf_counter() - started
                return PrepareResult(
                    manifest=made,
                    up_to_date=False,
                    seconds=seconds,
                    rows_per_second=made.rows / seconds,
                )
    seconds = time.perf_counter() - started
    return PrepareResult(manifest=found, up_to_date=True, seconds=seconds, rows_per_second=0.0)


def _make(
    raw: Sequence[Path],
    request: folder.Request,
    partial: folder.Partial,
    options: PrepareOptions,
    progress: Progress,
) -> Manifest:
    semantics = options.semantics
    folder.check_space(partial.result, _needed_bytes(raw, request.sources))
    with Workers(options.processes) as workers:
        ingested = _parse(raw, request.sources, partial, options, workers, progress)
        days = cut(ingested.segments, _day_rows(ingested, raw, semantics))
        rows = sum(ingested.file_rows)
        report = _counter(progress, "vocabulary", NUM_CATEGORICAL * rows)
        columns = number_columns(partial.spill, partial.result, days, semantics, workers, report)
        report = _counter(progress, "assemble", rows)
        shards = assemble_days(partial.spill, partial.result, days, workers, report)
    made = Manifest(
        format=manifest.FORMAT,
        semantics=semantics,
        sources=tuple(request.sources),
        days=tuple(shards),
        table_rows=tuple(column.table_rows for column in columns),
        out_of_vocabulary=shares_id(semantics),
        vocabulary_xxh3=xxhash.xxh3_128_hexdigest(b"".join(column.digest for column in columns)),
        bad_rows=ingested.bad_rows,
        zero_keys=ingested.zero_keys,
    )
    manifest.write(partial.result, made)
    partial.publish()
    return made


def _check(raw: Sequence[Path], options: PrepareOptions) -> None:
    semantics = options.semantics
    if not raw:
        raise ConfigError("data.raw is empty: name at least one file")
    for key, value in (("processes", options.processes), ("block_bytes", options.block_bytes)):
        if value < 1:
            raise ConfigError(f"data.{key}={value}: must be at least 1")
    for key, choices in _CHOICES.items():
        if getattr(semantics, key) not in choices:
            raise ConfigError(f"data.{key}={getattr(semantics, key)}: one of {', '.join(choices)}")
    if semantics.day_split == "files" and semantics.days != len(raw):
        raise ConfigError(
            f"data.days={semantics.days}, but data.raw holds {len(raw)} files and "
            "data.day_split=files takes each for one day"
        )
    if semantics.vocabulary == "train_days" and semantics.days < 2:
        raise ConfigError(f"data.days={semantics.days}: data.vocabulary=train_days needs 2 or more")


def _needed_bytes(raw: Sequence[Path], sources: Sequence[SourceFile]) -> int:
    """Spill and shards for as many rows as the head of each file lets expect."""
    rows = 0.0
    for path, source in zip(raw, sources, strict=True):
        head = reader.sample(path)
        rows += source.num_bytes * head.lines / max(1, head.raw_bytes)
    return round(rows * _SPILL_AND_SHARD_BYTES * _SPACE_MARGIN)


def _parse(
    raw: Sequence[Path],
    sources: Sequence[SourceFile],
    partial: folder.Partial,
    options: PrepareOptions,
    workers: Workers,
    progress: Progress,
) -> Ingested:
    on_bad_row = options.semantics.on_bad_row
    quarantine = partial.result / QUARANTINE_FILE if on_bad_row == "quarantine" else None
    policy = BadRowPolicy(on_bad_row == "error", options.max_bad_rows, quarantine)
    total = sum(source.num_bytes for source in sources)

    def on_bytes(done: int) -> None:
        progress("parse", done, total)

    on_bytes(0)
    ingested = ingest(raw, partial.spill, options.block_bytes, policy, workers, on_bytes)
    on_bytes(total)
    for path, before in zip(raw, sources, strict=True):
        if reader.describe(path) != before:
            raise DataError(f"{path}: changed while it was read (data.raw)")
    return ingested


def _day_rows(ingested: Ingested, raw: Sequence[Path], semantics: Semantics) -> list[int]:
    """Rows of each day.

    Raises:
        DataError: a day would have none.
    """
    if semantics.day_split == "files":
        for path, rows in zip(raw, ingested.file_rows, strict=True):
            if rows == 0:
                raise DataError(f"{path}: no rows for its day (data.day_split=files)")
        return list(ingested.file_rows)
    total = sum(ingested.file_rows)
    if total < semantics.days:
        raise DataError(f"{raw[0]}: {total} rows cannot make {semantics.days} days (data.days)")
    rows, longer = divmod(total, semantics.days)
    return [rows + (day < longer) for day in range(semantics.days)]


def _counter(progress: Progress, stage: str, total: int) -> Callable[[int], None]:
    """A report function that adds up for `progress`."""
    done = 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        progress(stage, done, total)

    report(0)
    return report
