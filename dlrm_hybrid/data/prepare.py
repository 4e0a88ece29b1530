"""Raw rows to shards: parse, number the categories, put the ids together.

    raw files ──parse──▶ labels, dense values; spilled keys ──vocabulary──▶ ids ──assemble──▶ ids

Everything is made in `<output>.partial` and renamed at the end; the manifest is the last file. The
result depends on the raw bytes and `Semantics` only, on no block size and no number of threads.

Shapes: N rows of a piece, F categorical columns with one id a row.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.data import folder, manifest
from dlrm_hybrid.data.arrays import (
    Array,
    ArrayWriter,
    StoredArray,
    open_array,
    read_rows,
)
from dlrm_hybrid.data.counts import FileRows, told
from dlrm_hybrid.data.folder import QUARANTINE_FILE, Generated, PrepareOptions, Raw, Say
from dlrm_hybrid.data.manifest import FileStamp, Manifest, Part, Parts, Semantics, SourceFile
from dlrm_hybrid.data.sources import text
from dlrm_hybrid.data.sources.criteo import BadRowPolicy, Ingested, Targets, ingest
from dlrm_hybrid.data.vocabulary import number_columns
from dlrm_hybrid.threads import Report, Threads
from dlrm_hybrid.types import DataError

_SPACE_MARGIN = 1.05
_PIECE_ROWS = 1 << 15  # whose ids are put together at a time
_WINDOW_PER_THREAD = 3

Progress = Callable[[str, int, int | None], None]
"""Called with the stage, what is done and the total: bytes of the raw files for `parse`, columns ×
rows for `vocabulary`, rows for `assemble`; of tables rows for `read`, whose total is not known."""


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
        made = _make(raw, partial, options, progress, say)
    seconds = time.perf_counter() - started
    return PrepareResult(
        manifest=made, up_to_date=False, seconds=seconds, rows_per_second=made.rows / seconds
    )


def _make(
    raw: Raw, partial: folder.Partial, options: PrepareOptions, progress: Progress, say: Say
) -> Manifest:
    generated = isinstance(raw, Generated)
    if generated:
        path = partial.folder / raw.name
        raw.write(path)
        raw = (path,)
    stamps = [manifest.stamp(path) for path in raw]
    schema = options.semantics.schema
    ids_bytes = 4 * len(schema.categorical)
    row_bytes = 4 + 4 * schema.num_dense + 2 * ids_bytes  # keys are spilled first
    if schema.format == "criteo":
        rows = sum(map(text.estimated_rows, raw))
        folder.check_space(partial.result, round(rows * row_bytes * _SPACE_MARGIN))
    if schema.format == "criteo":
        with Threads(options.processes) as threads:
            made, files = _criteo(raw, stamps, partial, options, threads, progress)
    else:
        made, files = _table(raw, stamps, partial, options, progress)
    _check_unchanged(raw, stamps)  # again: rows that came while arrays were made are not in them
    if generated:
        raw[0].unlink()  # the same bytes can be made again
    else:
        for line in told(files):
            say(line)
    manifest.write(partial.result, made)
    partial.publish()
    return made


def _criteo(
    raw: Sequence[Path],
    stamps: Sequence[FileStamp],
    partial: folder.Partial,
    options: PrepareOptions,
    threads: Threads,
    progress: Progress,
) -> tuple[Manifest, Sequence[FileRows]]:
    """Make the arrays and vocabularies of Criteo's text."""
    semantics, result = options.semantics, partial.result
    num_columns = len(semantics.schema.categorical)
    spilled = tuple(partial.spill / f"{number}.bin" for number in range(1, num_columns + 1))
    with (
        ArrayWriter(result / "label.npy", np.float32) as label,
        ArrayWriter(result / "dense.npy", np.float32, semantics.schema.num_dense) as dense,
    ):
        targets = Targets(label=label, dense=dense, keys=spilled)
        ingested = _parse(raw, stamps, targets, result, options, threads, progress)
        arrays = [label.finish(), dense.finish()]
    days = _day_rows(ingested, raw, semantics)
    rows = sum(days)
    report = _counter(progress, "vocabulary", num_columns * rows)
    known = rows - days[-1], rows
    columns = number_columns(spilled, result, known, semantics, threads, report)
    report = _counter(progress, "assemble", rows)
    arrays.append(assemble(spilled, rows, result / "ids.npy", threads, report))
    made = Manifest(
        format=manifest.FORMAT,
        semantics=semantics,
        sources=tuple(
            SourceFile(stamp=stamp, xxh3=xxh3)
            for stamp, xxh3 in zip(stamps, ingested.file_xxh3, strict=True)
        ),
        parts=count_clicks(result, arrays[0], (rows - days[-1], 0, days[-1])),
        arrays=tuple(arrays),
        table_rows=tuple(column.table_rows for column in columns),
        out_of_vocabulary=semantics.shares_id,
        vocabulary_xxh3=xxhash.xxh3_128_hexdigest(b"".join(column.digest for column in columns)),
        scales=(None,) * semantics.schema.num_dense,
        bad_rows=ingested.bad_rows,
        zero_keys=ingested.zero_keys,
    )
    counts = zip(raw, ingested.file_rows, ingested.file_bad_rows, strict=True)
    return made, [FileRows(*one) for one in counts]


def _table(
    raw: Sequence[Path],
    stamps: Sequence[FileStamp],
    partial: folder.Partial,
    options: PrepareOptions,
    progress: Progress,
) -> tuple[Manifest, Sequence[FileRows]]:
    """Make the arrays and vocabularies of a table."""
    from dlrm_hybrid.data.sources.tables import (
        Spill,
        read_tables,
        write_tables,
    )  # Arrow takes a while

    semantics = options.semantics
    policy = _policy(partial.result, options)
    report = _counter(progress, "read", None)
    with Spill(partial.spill / "columns.bin") as spill:
        read = read_tables(raw, semantics, spill, policy, options.block_bytes, report)
        _check_unchanged(raw, stamps)
        report = _counter(progress, "assemble", sum(read.rows))
        written = write_tables(read, semantics, spill, partial.result, report)
    made = Manifest(
        format=manifest.FORMAT,
        semantics=semantics,
        sources=tuple(
            SourceFile(stamp=stamp, xxh3=xxh3)
            for stamp, xxh3 in zip(stamps, read.xxh3, strict=True)
        ),
        parts=count_clicks(partial.result, written.arrays[0], read.rows),
        arrays=written.arrays,
        table_rows=written.table_rows,
        out_of_vocabulary=semantics.shares_id,
        vocabulary_xxh3=written.vocabulary_xxh3,
        scales=read.scales,
        bad_rows=read.bad_rows,
        zero_keys=0,
    )
    return made, read.files


def _policy(result: Path, options: PrepareOptions) -> BadRowPolicy:
    on_bad_row = options.semantics.on_bad_row
    quarantine = result / QUARANTINE_FILE if on_bad_row == "quarantine" else None
    return BadRowPolicy(on_bad_row == "error", options.max_bad_rows, quarantine)


def _check_unchanged(raw: Sequence[Path], stamps: Sequence[FileStamp]) -> None:
    for path, before in zip(raw, stamps, strict=True):
        if (now := manifest.stamp(path)) != before:
            sizes = f"{before.num_bytes} bytes at first, {now.num_bytes} at the end"
            raise DataError(f"{path}: changed while it was read: {sizes} (data.raw)")


def _parse(
    raw: Sequence[Path],
    stamps: Sequence[FileStamp],
    targets: Targets,
    result: Path,
    options: PrepareOptions,
    threads: Threads,
    progress: Progress,
) -> Ingested:
    policy = _policy(result, options)
    total = sum(stamp.num_bytes for stamp in stamps)

    def on_bytes(done: int) -> None:
        progress("parse", done, total)

    on_bytes(0)
    ingested = ingest(raw, targets, options.block_bytes, policy, threads, on_bytes)
    on_bytes(total)
    _check_unchanged(raw, stamps)
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
    assert semantics.days is not None, "Criteo's rows have days"
    if total < semantics.days:
        raise DataError(f"{raw[0]}: {total} rows cannot make {semantics.days} days (data.days)")
    rows, longer = divmod(total, semantics.days)
    return [rows + (day < longer) for day in range(semantics.days)]


def _counter(progress: Progress, stage: str, total: int | None) -> Callable[[int], None]:
    """A report function that adds up for `progress`."""
    done = 0

    def report(rows: int) -> None:
        nonlocal done
        done += rows
        progress(stage, done, total)

    report(0)
    return report


def assemble(
    spilled: Sequence[Path], rows: int, path: Path, threads: Threads, report: Report
) -> StoredArray:
    """Put spilled ids of all columns side by side.

    Args:
        spilled: the file of uint32 ids of each column.
        rows: in each of them.
        path: the .npy file to make.
        threads: that read and transpose.
        report: called with rows that are done.
    """
    pieces = (range(first, min(first + _PIECE_ROWS, rows)) for first in range(0, rows, _PIECE_ROWS))

    def piece(rows_of_piece: range, _: Report) -> Array:
        return _ids(spilled, rows_of_piece)

    window = _WINDOW_PER_THREAD * threads.count
    with ArrayWriter(path, np.int32, len(spilled)) as ids:
        for ids_NF in threads.run(piece, pieces, report, window=window):
            ids.append(ids_NF)
            report(len(ids_NF))
        return ids.finish()


def _ids(spilled: Sequence[Path], rows: range) -> npt.NDArray[np.int32]:
    """Ids of consecutive rows, contiguous row by row."""
    ids_FN = np.empty((len(spilled), len(rows)), np.int32)
    for path, ids_N in zip(spilled, ids_FN, strict=True):
        with path.open("rb", buffering=0) as file:
            read_rows(file, rows.start, ids_N)
    return np.ascontiguousarray(ids_FN.T)


def count_clicks(folder: Path, labels: StoredArray, rows: tuple[int, int, int]) -> Parts:
    """The parts of training, validation and tests, which have so many rows."""
    label_N = open_array(folder, labels)
    borders = (0, *accumulate(rows))
    clicks = [
        int(np.count_nonzero(label_N[first : first + count]))
        for first, count in zip(borders, rows, strict=False)
    ]
    train, validation, test = (
        Part(rows=count, clicks=ones) for count, ones in zip(rows, clicks, strict=True)
    )
    return Parts(train=train, validation=validation, test=test)
