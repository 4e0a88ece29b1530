"""Raw Criteo rows to shards: parse, number the categories, put the records together.

    raw files ──parse──▶ spilled columns ──vocabulary──▶ ids in their place ──assemble──▶ shards

Everything is made in `<output>.partial` and renamed at the end; the manifest is the last file. The
result depends on the raw bytes and `Semantics` only, on no block size and no number of threads.

Shapes: R rows of a piece, W = 40 words of a record.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import xxhash

from dlrm_hybrid import disk
from dlrm_hybrid.data import folder, manifest, reader
from dlrm_hybrid.data.folder import QUARANTINE_FILE, Generated, PrepareOptions, Raw, Say
from dlrm_hybrid.data.format import (
    BLOCK_ROWS,
    FIRST_ID_WORD,
    NUM_CATEGORICAL,
    RECORD_BYTES,
    Spill,
    read_rows,
)
from dlrm_hybrid.data.ingest import BadRowPolicy, Ingested, ingest
from dlrm_hybrid.data.manifest import FileStamp, Manifest, Semantics, Shard, SourceFile, Words
from dlrm_hybrid.data.vocabulary import number_columns, shares_id
from dlrm_hybrid.threads import Report, Threads
from dlrm_hybrid.types import DataError

_SPILL_AND_SHARD_BYTES = 2 * RECORD_BYTES
_SPACE_MARGIN = 1.05

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, what is done and the total: bytes of the raw files for `parse`, columns ×
rows for `vocabulary`, rows for `assemble`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """What is there now; the times are 0 when it was up to date already."""

    manifest: Manifest
    up_to_date: bool
    seconds: float
    rows_per_second: float


def prepare(
    raw: Raw, output: Path, options: PrepareOptions, progress: Progress, say: Say
) -> PrepareResult:
    """Turn raw files into a folder of shards, or find that they are there already.

    Args:
        raw: the files, one for each day with `day_split=files`; or how to make the one there is,
            which is removed again.
        output: the folder.
        options: how.
        progress: called with how far it is.
        say: called with what a person should know: which process it waits for, what it replaces.

    Raises:
        DataError: a bad row, a damaged file, or an output made from something else.
        ResourceError: no room, no right to write, or a killed worker.
    """
    started = time.perf_counter()
    with folder.disk_errors(output), folder.partial(output, say) as partial:
        found = folder.current(output, raw, options, say)
        if isinstance(found, Manifest):
            return PrepareResult(manifest=found, up_to_date=True, seconds=0.0, rows_per_second=0.0)
        if found is not None:
            say(f"{found.reason}; replacing it")
        made = _make(raw, partial, options, progress)
    seconds = time.perf_counter() - started
    return PrepareResult(
        manifest=made, up_to_date=False, seconds=seconds, rows_per_second=made.rows / seconds
    )


def _make(
    raw: Raw, partial: folder.Partial, options: PrepareOptions, progress: Progress
) -> Manifest:
    semantics = options.semantics
    generated = isinstance(raw, Generated)
    if generated:
        path = partial.folder / raw.name
        raw.write(path)
        raw = (path,)
    stamps = [manifest.stamp(path) for path in raw]
    rows = sum(map(reader.estimated_rows, raw))
    folder.check_space(partial.result, round(rows * _SPILL_AND_SHARD_BYTES * _SPACE_MARGIN))
    with Threads(options.processes) as threads:
        ingested = _parse(raw, stamps, partial, options, threads, progress)
        if generated:
            raw[0].unlink()  # the same bytes can be made again
        borders = (0, *accumulate(_day_rows(ingested, raw, semantics)))
        days, rows = [range(*pair) for pair in pairwise(borders)], borders[-1]
        report = _counter(progress, "vocabulary", NUM_CATEGORICAL * rows)
        columns = number_columns(partial.spill, partial.result, days, semantics, threads, report)
        report = _counter(progress, "assemble", rows)
        tasks = [
            ShardTask(partial.spill, rows_of_day, partial.result / f"day_{day}.bin")
            for day, rows_of_day in enumerate(days)
        ]
        shards = tuple(threads.run(assemble, tasks, report, window=len(tasks)))
    made = Manifest(
        format=manifest.FORMAT,
        semantics=semantics,
        sources=tuple(
            SourceFile(stamp=stamp, xxh3=xxh3)
            for stamp, xxh3 in zip(stamps, ingested.file_xxh3, strict=True)
        ),
        days=shards,
        table_rows=tuple(column.table_rows for column in columns),
        out_of_vocabulary=shares_id(semantics),
        vocabulary_xxh3=xxhash.xxh3_128_hexdigest(b"".join(column.digest for column in columns)),
        bad_rows=ingested.bad_rows,
        zero_keys=ingested.zero_keys,
    )
    manifest.write(partial.result, made)
    partial.publish()
    return made


def _parse(
    raw: Sequence[Path],
    stamps: Sequence[FileStamp],
    partial: folder.Partial,
    options: PrepareOptions,
    threads: Threads,
    progress: Progress,
) -> Ingested:
    on_bad_row = options.semantics.on_bad_row
    quarantine = partial.result / QUARANTINE_FILE if on_bad_row == "quarantine" else None
    policy = BadRowPolicy(on_bad_row == "error", options.max_bad_rows, quarantine)
    total = sum(stamp.num_bytes for stamp in stamps)

    def on_bytes(done: int) -> None:
        progress("parse", done, total)

    on_bytes(0)
    ingested = ingest(raw, partial.spill, options.block_bytes, policy, threads, on_bytes)
    on_bytes(total)
    for path, before in zip(raw, stamps, strict=True):
        if (now := manifest.stamp(path)) != before:
            sizes = f"{before.num_bytes} bytes at first, {now.num_bytes} at the end"
            raise DataError(f"{path}: changed while it was read: {sizes} (data.raw)")
    return ingested


def _day_rows(ingested: Ingested, raw: Sequence[Path], semantics: Semantics) -> list[int]:
    """How many rows each day of the data has.

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


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One day: its rows in the spill, and the file to write."""

    spill: Spill
    rows: range
    shard: Path


def assemble(task: ShardTask, report: Report) -> Shard:
    """Write the records of one day and flush them to the disk."""
    rows = clicks = 0
    blocks: list[str] = []

    def parts() -> Iterator[memoryview]:
        nonlocal rows, clicks
        for records_RW in _records(task):
            part = records_RW.reshape(-1).view(np.uint8).data
            rows += len(records_RW)
            clicks += int(np.count_nonzero(records_RW[:, 0]))
            blocks.append(xxhash.xxh3_64_hexdigest(part))
            report(len(records_RW))
            yield part

    written = disk.write(task.shard, parts())
    return Shard(
        file=task.shard.name, rows=rows, clicks=clicks, xxh3=written.xxh3, blocks=tuple(blocks)
    )


def _records(task: ShardTask) -> Iterator[Words]:
    """The records of a day, block after block."""
    ids = np.empty((NUM_CATEGORICAL, BLOCK_ROWS), np.uint32)
    with ExitStack() as stack:
        words_file, *ids_files = (
            stack.enter_context(path.open("rb")) for path in (task.spill.words, *task.spill.columns)
        )
        for at in range(0, len(task.rows), BLOCK_ROWS):
            block = task.rows[at : at + BLOCK_ROWS]
            words = np.empty((len(block), FIRST_ID_WORD), np.uint32)
            read_rows(words_file, block.start, words)
            for file, ids_R in zip(ids_files, ids, strict=True):
                read_rows(file, block.start, ids_R[: len(block)])
            yield np.concatenate([words, ids[:, : len(block)].T], axis=1)
