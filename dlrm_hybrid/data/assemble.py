"""Spilled columns to one shard of row-major records.

Shapes: R rows of a piece, W = 40 words of a record.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_hybrid.data.checksum import ShardChecksums
from dlrm_hybrid.data.format import (
    FIRST_ID_WORD,
    NUM_CATEGORICAL,
    RECORD_BYTES,
    RECORD_WORDS,
)
from dlrm_hybrid.data.manifest import Shard
from dlrm_hybrid.data.spill import (
    WORD_BYTES,
    Segment,
    Spill,
    opened,
    pieces,
    read_at,
    write_at,
)
from dlrm_hybrid.data.workers import Report, Workers
from dlrm_hybrid.kernels.assemble import interleave

_PIECE_ROWS = 1 << 13


@dataclass(frozen=True, slots=True)
class ShardTask:
    """One day: its rows in the spill, and the file to write."""

    spill: Spill
    segments: tuple[Segment, ...]
    shard: Path


def assemble_days(
    spill: Spill,
    folder: Path,
    days: Sequence[tuple[Segment, ...]],
    workers: Workers,
    report: Report,
) -> list[Shard]:
    """Write `folder/day_0.bin` …, one task each: its checksum runs with the writing."""
    tasks = [
        ShardTask(spill, segments, folder / f"day_{day}.bin") for day, segments in enumerate(days)
    ]
    return list(workers.run(assemble, tasks, report, window=len(tasks), queued=1))


def assemble(task: ShardTask, report: Report) -> Shard:
    """Write the records of one day and flush them to the disk."""
    words = np.empty((_PIECE_ROWS, FIRST_ID_WORD), np.uint32)
    ids = np.empty((NUM_CATEGORICAL, _PIECE_ROWS), np.uint32)
    records = np.empty((_PIECE_ROWS, RECORD_WORDS), np.uint32)
    checksums = ShardChecksums()
    rows = clicks = 0
    with ExitStack() as stack:
        columns = [
            stack.enter_context(opened(task.spill.column(column), os.O_RDONLY))
            for column in range(NUM_CATEGORICAL)
        ]
        words_fd = stack.enter_context(opened(task.spill.words, os.O_RDONLY))
        shard_fd = stack.enter_context(opened(task.shard, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
        for piece in pieces(task.segments, _PIECE_ROWS):
            read_at(words_fd, words[: piece.rows], piece.first * FIRST_ID_WORD * WORD_BYTES)
            for column, fd in enumerate(columns):
                read_at(fd, ids[column, : piece.rows], piece.first * WORD_BYTES)
            records_RW = records[: piece.rows]
            clicks += interleave(words, ids, records_RW)
            write_at(shard_fd, records_RW, rows * RECORD_BYTES)
            checksums.update(records_RW)
            rows += piece.rows
            report(piece.rows)
        os.fsync(shard_fd)
    return checksums.shard(task.shard.name, clicks)
