"""Criteo's rows to shards: keys are replaced by ids in the spilled file of each column.

Without a shared id, ids count categories by first appearance, as in facebookresearch/dlrm. With
one (`min_count` > 1 or a vocabulary of the training days), id 0 is every category that is left out,
and the others count from 1.

Shapes: N rows of a block or piece, F categorical columns, V categories.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

import numpy as np
import xxhash

from dlrm_hybrid import disk
from dlrm_hybrid.arrays import Int32s, Words
from dlrm_hybrid.data.arrays import ArrayWriter, StoredArray, read_rows
from dlrm_hybrid.data.folder import check_space
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER, Semantics
from dlrm_hybrid.data.preprocessing import write_vocabulary
from dlrm_hybrid.data.sources.criteo import ingest
from dlrm_hybrid.data.sources.raw import Prepared, PrepareJob
from dlrm_hybrid.data.sources.text import estimated_rows
from dlrm_hybrid.kernels.criteo import count, insert, keys_by_number, lookup, rehash
from dlrm_hybrid.threads import Report
from dlrm_hybrid.types import DataError

_SPACE_MARGIN = 1.05
_PIECE_ROWS = 1 << 15  # rows assembled at a time
_WINDOW_PER_THREAD = 3
_BLOCK_ROWS = 1 << 18
_HEAD_ROWS = 1 << 16
_FIRST_SLOTS = 1 << 10
_MAX_IDS = 2**31 - 1


def prepare_criteo(job: PrepareJob) -> Prepared:
    """Make arrays and vocabularies from Criteo's text.

    Raises:
        DataError: a bad row, a damaged file, or a day without rows.
        ResourceError: the disk has too little room.
    """
    semantics, result = job.options.semantics, job.partial.result
    num_dense, num_columns = semantics.schema.num_dense, len(semantics.schema.categorical)
    row_bytes = 4 + 4 * num_dense + 2 * 4 * num_columns  # keys are spilled first
    num_bytes = sum(map(estimated_rows, job.raw)) * row_bytes
    check_space(result, round(num_bytes * _SPACE_MARGIN))
    spilled = tuple(job.partial.spill / f"{number}.bin" for number in range(1, num_columns + 1))
    with (
        ArrayWriter(result / "label.npy", np.float32) as label,
        ArrayWriter(result / "dense.npy", np.float32, num_dense) as dense,
    ):
        xxh3, zero_keys = ingest(job, label, dense, spilled)
        arrays = [label.finish(), dense.finish()]
    days = _day_rows(job)
    rows, test = sum(days), days[-1]
    known_rows = rows - test if semantics.vocabulary == "train_days" else rows
    columns = _number_columns(job, spilled, rows, known_rows)
    arrays.append(_assemble(spilled, rows, job))
    return Prepared(
        xxh3=xxh3,
        rows=(rows - test, 0, test),
        arrays=tuple(arrays),
        table_rows=tuple(size for size, _ in columns),
        vocabulary_xxh3=xxhash.xxh3_128_hexdigest(b"".join(digest for _, digest in columns)),
        scales=(None,) * num_dense,
        zero_keys=zero_keys,
    )


def _day_rows(job: PrepareJob) -> list[int]:
    semantics, rows = job.options.semantics, [counts.kept for counts in job.counts.files]
    if semantics.day_split == "files":
        for path, count in zip(job.raw, rows, strict=True):
            if count == 0:
                raise DataError(f"{path}: no rows for its day (data.day_split=files)")
        return rows
    total = sum(rows)
    assert semantics.days is not None, "Criteo's rows have days"
    if total < semantics.days:
        raise DataError(f"{job.raw[0]}: {total} rows cannot make {semantics.days} days (data.days)")
    quotient, longer = divmod(total, semantics.days)
    return [quotient + (day < longer) for day in range(semantics.days)]


def _assemble(spilled: Sequence[Path], rows: int, job: PrepareJob) -> StoredArray:
    pieces = (range(first, min(first + _PIECE_ROWS, rows)) for first in range(0, rows, _PIECE_ROWS))

    def piece(rows_of_piece: range, _: Report) -> Int32s:
        ids_FN = np.empty((len(spilled), len(rows_of_piece)), np.int32)
        for path, ids_N in zip(spilled, ids_FN, strict=True):
            with path.open("rb", buffering=0) as file:
                read_rows(file, rows_of_piece.start, ids_N)
        return np.ascontiguousarray(ids_FN.T)

    window = _WINDOW_PER_THREAD * job.threads.count
    report = job.counter("assemble", rows)
    with ArrayWriter(job.partial.result / "ids.npy", np.int32, len(spilled)) as ids:
        for ids_NF in job.threads.run(piece, pieces, report, window=window):
            ids.append(ids_NF)
            report(len(ids_NF))
        return ids.finish()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Columns:
    """The categorical columns whose keys are to be replaced by ids.

    Attributes:
        spilled: files of keys, overwritten by ids.
        folder: gets the vocabularies.
        known_rows: number of first rows whose categories make the vocabulary.
        semantics: which categories are kept, and whether the others share id 0.
    """

    spilled: Sequence[Path]
    folder: Path
    rows: int
    known_rows: int
    semantics: Semantics

    def distinct_in_head(self, column: int) -> int:
        """Number of distinct keys in the first rows: an estimate of a column's time."""
        count = min(_HEAD_ROWS, self.known_rows)
        return np.unique(np.fromfile(self.spilled[column], np.uint32, count)).size

    def encode(self, column: int, report: Report) -> tuple[int, bytes]:
        """Replace keys by ids, write the vocabulary: rows of the table, and the keys' xxh3-128."""
        with self.spilled[column].open("r+b") as file:
            table, counts_V = self._number(file, report)
            keys_V = table.keys()
            del table  # makes room for the remapping below
            if counts_V is not None:
                kept_V = counts_V[: keys_V.size] >= (self.semantics.min_count or 0)
                keys_V = keys_V[kept_V]
                new_ids = np.zeros(kept_V.size + 1, np.uint32)  # after the shared id 0
                np.cumsum(kept_V, dtype=np.uint32, out=new_ids[1:])
                new_ids[1:] *= kept_V
                for ids_N in _blocks(file, range(self.rows)):
                    ids_N[:] = new_ids[ids_N]
        meaning = self.semantics.schema.categorical[column]
        digest = write_vocabulary(self.folder, column + 1, keys_V, meaning)
        return keys_V.size + self.semantics.shares_id[0], digest

    def _number(self, file: BufferedRandom, report: Report) -> tuple[KeyTable, Words | None]:
        """Replace keys by numbers of first appearance; count each if `min_count` matters."""
        table, semantics = KeyTable(), self.semantics
        min_count, wrapped = semantics.min_count or 0, semantics.max_ind_range or 0
        counts_V = np.zeros(_FIRST_SLOTS, np.uint32) if min_count > 1 else None
        first_id = int(semantics.shares_id[0])
        parts = (True, range(self.known_rows)), (False, range(self.known_rows, self.rows))
        for is_known, rows in parts:
            for keys_N in _blocks(file, rows):
                if 0 < wrapped <= 0xFFFFFFFF:
                    keys_N %= np.uint32(wrapped)
                if is_known:
                    table.insert(keys_N, first_id)
                else:
                    table.lookup(keys_N)
                if is_known and counts_V is not None:
                    if table.used > counts_V.size:
                        counts_V = np.concatenate([counts_V, np.zeros(table.used, np.uint32)])
                    count(keys_N, counts_V, first_id)
                report(keys_N.size)
        return table, counts_V


class KeyTable:
    """Hash table from keys to numbers by first appearance; it doubles when three quarters full."""

    def __init__(self) -> None:
        self.slots = np.zeros(_FIRST_SLOTS, np.uint64)
        self.used = 0

    def insert(self, keys_N: Words, first_id: int) -> None:
        """Replace keys by `first_id` + number, in place; new keys are added."""
        start = 0
        while start < keys_N.size:
            limit = min(self.slots.size // 4 * 3, _MAX_IDS)
            replaced, self.used, _ = insert(keys_N[start:], self.slots, self.used, limit, first_id)
            start += replaced
            if start < keys_N.size:
                if limit == _MAX_IDS:
                    raise DataError(f"more than {_MAX_IDS} categories in one column")
                grown = np.zeros(2 * self.slots.size, np.uint64)
                rehash(self.slots, grown)
                self.slots = grown

    def lookup(self, keys_N: Words) -> None:
        """Replace keys by 1 + number, unknown ones by 0, in place."""
        lookup(keys_N, self.slots)

    def keys(self) -> Words:
        """The keys in order of their numbers, uint32 (V,)."""
        keys_V = np.empty(self.used, np.uint32)
        keys_by_number(self.slots, keys_V)
        return keys_V


def _number_columns(
    job: PrepareJob, spilled: Sequence[Path], rows: int, known_rows: int
) -> list[tuple[int, bytes]]:
    """Replace the keys of all columns by ids, a task per column."""
    folder, numbers = job.partial.result / VOCABULARY_FOLDER, range(len(spilled))
    folder.mkdir()
    columns = _Columns(
        spilled=spilled,
        folder=folder,
        rows=rows,
        known_rows=known_rows,
        semantics=job.options.semantics,
    )
    # Slow columns first, so that no thread is left alone with one at the end.
    order = sorted(numbers, key=lambda column: -columns.distinct_in_head(column))
    report = job.counter("vocabulary", len(spilled) * rows)
    results = job.threads.run(columns.encode, order, report, window=len(order))
    by_column = dict(zip(order, results, strict=True))
    disk.flush(folder)
    return [by_column[column] for column in numbers]


def _blocks(file: BufferedRandom, rows: range) -> Iterator[Words]:
    """Yield a file's keys of these rows in blocks; what the caller changes is written back."""
    buffer = np.empty(min(_BLOCK_ROWS, len(rows)), np.uint32)
    for part in (rows[at : at + _BLOCK_ROWS] for at in range(0, len(rows), _BLOCK_ROWS)):
        keys_N = buffer[: len(part)]
        read_rows(file, part.start, keys_N)
        yield keys_N
        file.seek(part.start * keys_N.itemsize)
        file.write(keys_N.data)
