"""Raw rows to shards: parse, number the categories, assemble the ids.

    raw files ──parse──▶ labels, dense values; spilled keys ──vocabulary──▶ ids ──assemble──▶ ids

Everything is made in `<output>.partial` and renamed at the end; the manifest is the last file. The
result depends on the raw bytes and `Semantics` alone, not on block size or number of threads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from dlrm_hybrid.data import folder, manifest
from dlrm_hybrid.data.arrays import StoredArray, first_label, open_array
from dlrm_hybrid.data.folder import QUARANTINE_FILE, Generated, PrepareOptions, Raw, Say
from dlrm_hybrid.data.manifest import Base, FileStamp, Manifest, Part, Parts, SourceFile
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.sources.raw import BadRowPolicy, Prepared, PrepareJob, Progress, RowCounts
from dlrm_hybrid.threads import Threads
from dlrm_hybrid.types import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareResult:
    """The prepared output; the times are 0 if it was up to date already."""

    manifest: Manifest
    up_to_date: bool
    seconds: float
    rows_per_second: float


def prepare(
    raw: Raw, output: Path, options: PrepareOptions, progress: Progress, say: Say
) -> PrepareResult:
    """Turn raw files into a folder of shards, unless it is up to date already.

    Args:
        raw: the files, one for each day with `day_split=files`; or how to generate the only one,
            which is removed afterwards.
        say: called with messages for the user: which process it waits for, what it replaces.

    Raises:
        DataError: a bad row, a damaged file, or an output made from something else.
        ResourceError: no room, no right to write, or a killed worker.
    """
    start = time.perf_counter()
    with folder.disk_errors(output), folder.partial(output, say) as partial:
        before = folder.current(output, raw, options, say)
        if isinstance(before, Manifest):
            return PrepareResult(manifest=before, up_to_date=True, seconds=0.0, rows_per_second=0.0)
        if before is not None:
            say(f"{before.reason}; replacing it")
        written = _make(raw, partial, options, progress, say)
    seconds = time.perf_counter() - start
    return PrepareResult(
        manifest=written, up_to_date=False, seconds=seconds, rows_per_second=written.rows / seconds
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

    def check_unchanged() -> None:
        for path, before in zip(raw, stamps, strict=True):
            if (after := manifest.stamp(path)) != before:
                sizes = f"{before.num_bytes} bytes at first, {after.num_bytes} at the end"
                raise DataError(f"{path}: changed while it was read: {sizes} (data.raw)")

    result = partial.result
    with (
        Threads(options.processes) as threads,
        RowCounts(raw, _policy(result, options)) as counts,
    ):
        job = PrepareJob(
            raw=raw,
            num_bytes=sum(stamp.num_bytes for stamp in stamps),
            options=options,
            partial=partial,
            threads=threads,
            counts=counts,
            progress=progress,
            check_unchanged=check_unchanged,
        )
        prepared = _reader(job.schema)(job)
        counts.flush()
    written = _manifest(job, prepared, stamps)
    check_unchanged()  # again: rows may have been added while arrays were written
    if generated:
        raw[0].unlink()  # it can be generated again
    else:
        for line in counts.lines():
            say(line)
    manifest.write(result, written)
    partial.publish()
    return written


def _manifest(job: PrepareJob, prepared: Prepared, stamps: Sequence[FileStamp]) -> Manifest:
    sources = [
        SourceFile(stamp=stamp, xxh3=xxh3)
        for stamp, xxh3 in zip(stamps, prepared.xxh3, strict=True)
    ]
    base = job.options.base
    return Manifest(
        format=manifest.FORMAT,
        semantics=job.options.semantics,
        sources=tuple(sources),
        parts=count_clicks(job.partial.result, prepared.arrays[0], prepared.rows),
        arrays=prepared.arrays,
        table_rows=prepared.table_rows,
        out_of_vocabulary=job.shares_id,
        vocabulary_xxh3=prepared.vocabulary_xxh3,
        scales=prepared.scales,
        bad_rows=job.counts.bad,
        zero_keys=prepared.zero_keys,
        base=base
        and Base(
            meaning_xxh3=base.manifest.meaning_xxh3,
            grows=job.options.grows,
            growth=prepared.growth,
        ),
        vectors=prepared.vectors,
    )


def _reader(schema: Schema) -> Callable[[PrepareJob], Prepared]:
    if schema.format == "criteo":
        from dlrm_hybrid.data.sources.criteo_ids import prepare_criteo

        return prepare_criteo
    from dlrm_hybrid.data.sources.tables import prepare_tables  # Arrow takes a while

    return prepare_tables


def _policy(result: Path, options: PrepareOptions) -> BadRowPolicy:
    on_bad_row = options.semantics.on_bad_row
    quarantine = result / QUARANTINE_FILE if on_bad_row == "quarantine" else None
    return BadRowPolicy(on_bad_row == "error", options.max_bad_rows, quarantine)


def count_clicks(folder: Path, labels: StoredArray, rows: tuple[int, int, int]) -> Parts:
    """Count the clicks of the training, validation and test parts, given their rows."""
    label_N = first_label(open_array(folder, labels))
    borders = (0, *accumulate(rows))
    clicks = [
        int(np.count_nonzero(label_N[first : first + count]))
        for first, count in zip(borders, rows, strict=False)
    ]
    train, validation, test = (
        Part(rows=count, clicks=ones) for count, ones in zip(rows, clicks, strict=True)
    )
    return Parts(train=train, validation=validation, test=test)
