"""One column's categories to row numbers of its embedding table, in the spilled file itself.

Without a shared id, ids count categories by first appearance, as in facebookresearch/dlrm. With
one (`min_count` > 1 or a vocabulary of the training days), id 0 is every category that is left out
and the others count from 1.

Shapes: N rows of a block, V categories.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dlrm_hybrid import durable
from dlrm_hybrid.data.format import (
    NUM_CATEGORICAL,
    VOCABULARY_FOLDER,
    Segment,
    Spill,
    joined,
    pieces,
    read_rows,
    write_rows,
)
from dlrm_hybrid.data.manifest import Semantics
from dlrm_hybrid.kernels.criteo import count, insert, keys_by_number, lookup, rehash
from dlrm_hybrid.threads import Report, Threads
from dlrm_hybrid.types import DataError

Keys = npt.NDArray[np.uint32]
_BLOCK_ROWS = 1 << 18
_HEAD_ROWS = 1 << 16
_FIRST_SLOTS = 1 << 10
_MAX_IDS = 2**31 - 1


@dataclass(frozen=True, slots=True)
class ColumnTask:
    """One column to encode.

    Attributes:
        spilled: file of keys; ids take their place.
        keys: file to write: uint32 keys in id order, without one for a shared id 0.
        known: rows whose categories make the vocabulary.
        others: rows after them, whose unknown categories share id 0.
        shared_id: whether id 0 stands for all categories that are left out.
    """

    spilled: Path
    keys: Path
    known: tuple[Segment, ...]
    others: tuple[Segment, ...]
    shared_id: bool
    min_count: int
    max_ind_range: int


@dataclass(frozen=True, slots=True)
class ColumnResult:
    """Rows of the embedding table, the shared id included, and the xxh3-128 of the keys."""

    table_rows: int
    digest: bytes


class Table:
    """Keys to numbers by first appearance: the kernel's slots, doubled when three quarters full."""

    def __init__(self) -> None:
        self.slots = np.zeros(_FIRST_SLOTS, np.uint64)
        self.used = 0

    def insert(self, keys_N: Keys, first_id: int) -> None:
        """Replace keys by `first_id` + number, in place; new keys are added."""
        done = 0
        while done < keys_N.size:
            limit = min(self.slots.size // 4 * 3, _MAX_IDS)
            replaced, self.used, _ = insert(keys_N[done:], self.slots, self.used, limit, first_id)
            done += replaced
            if done < keys_N.size:
                if limit == _MAX_IDS:
                    raise DataError(f"more than {_MAX_IDS} categories in one column")
                grown = np.zeros(2 * self.slots.size, np.uint64)
                rehash(self.slots, grown)
                self.slots = grown

    def lookup(self, keys_N: Keys) -> None:
        """Replace keys by 1 + number, unknown ones by 0, in place."""
        lookup(keys_N, self.slots)

    def keys(self) -> Keys:
        """uint32 [V], the key of every number."""
        keys_V = np.empty(self.used, np.uint32)
        keys_by_number(self.slots, keys_V)
        return keys_V


def shares_id(semantics: Semantics) -> bool:
    """Whether id 0 stands for all categories outside the vocabulary."""
    return semantics.min_count > 1 or semantics.vocabulary == "train_days"


def number_columns(
    spill: Spill,
    folder: Path,
    days: Sequence[tuple[Segment, ...]],
    semantics: Semantics,
    threads: Threads,
    report: Report,
) -> list[ColumnResult]:
    """Encode all columns, one task each; writes `folder/vocabulary/C01.bin` …"""
    vocabulary = folder / VOCABULARY_FOLDER
    vocabulary.mkdir()
    known_days = len(days) - (semantics.vocabulary == "train_days")
    tasks = [
        ColumnTask(
            spilled=spill.column(column),
            keys=vocabulary / spill.column(column).name,
            known=joined(segment for day in days[:known_days] for segment in day),
            others=joined(segment for day in days[known_days:] for segment in day),
            shared_id=shares_id(semantics),
            min_count=semantics.min_count,
            max_ind_range=semantics.max_ind_range,
        )
        for column in range(NUM_CATEGORICAL)
    ]
    # The long columns first, so that no thread is left alone with one at the end.
    order = sorted(range(NUM_CATEGORICAL), key=lambda column: -_distinct_in_head(tasks[column]))
    by_length = [tasks[column] for column in order]
    results = threads.run(encode, by_length, report, window=len(order))
    by_column = dict(zip(order, results, strict=True))
    durable.flush(vocabulary)
    return [by_column[column] for column in range(NUM_CATEGORICAL)]


def _distinct_in_head(task: ColumnTask) -> int:
    """Distinct keys in the first block: a guess how long a column takes."""
    piece = next(pieces(task.known, _HEAD_ROWS))
    keys_N = np.empty(piece.rows, np.uint32)
    with task.spilled.open("rb") as file:
        read_rows(file, piece.first, keys_N)
    return np.unique(keys_N).size


def encode(task: ColumnTask, report: Report) -> ColumnResult:
    """Replace the keys of a column by ids and write its vocabulary."""
    with task.spilled.open("r+b") as file:
        table, counts_V = _number(task, file, report)
        keys_V = table.keys()
        del table  # the remapping below needs room of its own
        if counts_V is not None:
            kept_V = counts_V[: keys_V.size] >= task.min_count
            keys_V = keys_V[kept_V]
            _remap(task, file, kept_V)
    written = durable.write(task.keys, [keys_V.view(np.uint8).data])
    return ColumnResult(keys_V.size + task.shared_id, bytes.fromhex(written.xxh3))


def _number(task: ColumnTask, file: BufferedRandom, report: Report) -> tuple[Table, Keys | None]:
    """First pass: numbers by first appearance, and how often each was seen if that matters."""
    table = Table()
    counts_V = np.zeros(_FIRST_SLOTS, np.uint32) if task.min_count > 1 else None
    first_id = int(task.shared_id)
    buffer = np.empty(_BLOCK_ROWS, np.uint32)
    for segments, known in ((task.known, True), (task.others, False)):
        for piece in pieces(segments, _BLOCK_ROWS):
            keys_N = buffer[: piece.rows]
            read_rows(file, piece.first, keys_N)
            if 0 < task.max_ind_range <= 0xFFFFFFFF:
                keys_N %= np.uint32(task.max_ind_range)
            if known:
                table.insert(keys_N, first_id)
            else:
                table.lookup(keys_N)
            if known and counts_V is not None:
                if table.used > counts_V.size:
                    grown = np.zeros(max(2 * counts_V.size, table.used), np.uint32)
                    grown[: counts_V.size] = counts_V
                    counts_V = grown
                count(keys_N, counts_V, first_id)
            write_rows(file, piece.first, keys_N)
            report(piece.rows)
    return table, counts_V


def _remap(task: ColumnTask, file: BufferedRandom, kept_V: npt.NDArray[np.bool_]) -> None:
    """Second pass: the kept numbers close up after the shared id 0."""
    new_ids = np.zeros(kept_V.size + 1, np.uint32)
    np.cumsum(kept_V, dtype=np.uint32, out=new_ids[1:])
    new_ids[1:] *= kept_V
    buffer = np.empty(_BLOCK_ROWS, np.uint32)
    for piece in pieces((*task.known, *task.others), _BLOCK_ROWS):
        ids_N = buffer[: piece.rows]
        read_rows(file, piece.first, ids_N)
        write_rows(file, piece.first, new_ids[ids_N])
