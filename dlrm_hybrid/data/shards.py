"""Prepared rows, opened for reading: checked, mapped into memory, addressed by row number.

Rows are numbered across all parts: the training rows first, then validation, then test.

Shapes: R rows, I dense columns, F categorical columns with one id a row, N ids of a multi-hot one,
L labels if there are several.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, final

import numpy as np

from dlrm_hybrid.arrays import Bools, Float32s, Int32s, Int64s, Words
from dlrm_hybrid.bags import Bags, jagged, run_places
from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.arrays import (
    BLOCK_ROWS,
    Array,
    StoredArray,
    block_xxh3,
    first_label,
    open_array,
)
from dlrm_hybrid.data.manifest import Manifest, Semantics, Vectors
from dlrm_hybrid.data.preprocessing import DAMAGED, Preprocessing
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.types import ConfigError, DataError, ScoredPart

SAMPLED_BLOCKS = 32


class Lists(NamedTuple):
    """The ids of consecutive rows in a multi-hot column.

    Attributes:
        offsets_E: int64 (R + 1,), where the ids of each row begin in `values_N`, and their end.
        values_N: int32, ids of all rows of the column.
        weights_N: float32, their weights; None without any.
    """

    offsets_E: Int64s
    values_N: Int32s
    weights_N: Float32s | None = None

    def are_bad(self, table_rows: int, most: int) -> Bools:
        """Mask (R,) of the rows with more than `most` ids, one beyond the table or a bad weight."""
        starts_R, stops_R = self.offsets_E[:-1], self.offsets_E[1:]
        bad_R = (starts_R < 0) | (starts_R > stops_R) | (stops_R > len(self.values_N))
        bad_R |= stops_R - starts_R > most
        if not bad_R.any() and len(bad_R):
            span = slice(starts_R[0], stops_R[-1])
            ids_N = self.values_N[span]
            is_bad_N = (ids_N < 0) | (ids_N >= table_rows)
            if self.weights_N is not None:
                is_bad_N |= ~np.isfinite(self.weights_N[span])
            bad_N = np.concatenate([[0], np.cumsum(is_bad_N)])
            bad_R = bad_N[stops_R - starts_R[0]] > bad_N[starts_R - starts_R[0]]
        return bad_R


@final
class ListRecords:
    """A buffer for the lists of a multi-hot column in `rows` records, read in random order."""

    def __init__(self, rows: int, weighted: bool) -> None:
        self._starts_R = np.zeros(rows, np.int64)
        self._lengths_R = np.zeros(rows, np.int64)
        self._values_N = np.empty(0, np.int32)
        self._weights_N = np.empty(0, np.float32) if weighted else None
        self._used = 0

    def put(self, first: int, lists: Lists) -> None:
        """Copy lists into the buffer from record `first` on; 0 empties it first."""
        self._used = self._used if first else 0
        begin, end = int(lists.offsets_E[0]), int(lists.offsets_E[-1])
        size = self._used + end - begin
        if size > len(self._values_N):
            self._values_N = self._larger(self._values_N, size)
            if self._weights_N is not None:
                self._weights_N = self._larger(self._weights_N, size)
        self._values_N[self._used : size] = lists.values_N[begin:end]
        if self._weights_N is not None and lists.weights_N is not None:
            self._weights_N[self._used : size] = lists.weights_N[begin:end]
        records = slice(first, first + len(lists.offsets_E) - 1)
        self._starts_R[records] = lists.offsets_E[:-1] - begin + self._used
        self._lengths_R[records] = np.diff(lists.offsets_E)
        self._used = size

    def bags(self, order_B: Words) -> Bags[Int64s]:
        """The bags of records in this order, in the one table of the column."""
        lengths_B = self._lengths_R[order_B]
        places_N = run_places(self._starts_R[order_B], lengths_B)
        values_N = self._values_N[places_N].astype(np.int64)
        weights_N = None if self._weights_N is None else self._weights_N[places_N]
        return jagged(values_N, lengths_B[None], (), weights_N)

    def _larger(self, array_N: Array, size: int) -> Array:
        more_N = np.empty(2 * size - self._used, array_N.dtype)
        return np.concatenate([array_N[: self._used], more_N])


class StoredRows(NamedTuple):
    """Consecutive prepared rows: labels, dense columns and ids.

    Attributes:
        label_R: float32, 0 or 1; (R, L) if there are several labels.
        dense_RI: float32.
        ids_RF: int32, ids of the columns with one id per row.
        lists: ids of each multi-hot column.
        weight_R: float32, weights of the rows; None without a column of weights.
        group_R: int64, a hash of each row's group, 0 for no group; None without a column of groups.
    """

    label_R: Float32s
    dense_RI: Float32s
    ids_RF: Int32s
    lists: tuple[Lists, ...] = ()
    weight_R: Float32s | None = None
    group_R: Int64s | None = None

    def slice(self, first: int, stop: int) -> StoredRows:
        """The rows from `first` to before `stop`, without a copy."""
        return StoredRows(
            self.label_R[first:stop],
            self.dense_RI[first:stop],
            self.ids_RF[first:stop],
            tuple(bags._replace(offsets_E=bags.offsets_E[first : stop + 1]) for bags in self.lists),
            None if self.weight_R is None else self.weight_R[first:stop],
            None if self.group_R is None else self.group_R[first:stop],
        )


@dataclass(frozen=True, slots=True)
class Shards:
    """A folder of prepared rows, mapped into memory.

    Attributes:
        rows: read-only memory maps of all rows.
    """

    folder: Path
    manifest: Manifest
    rows: StoredRows

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.manifest.schema

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Number of rows that each embedding table needs."""
        return self.schema.by_table(self.manifest.table_rows)

    @property
    def train_rows(self) -> range:
        """The rows to train on."""
        return range(self.manifest.parts.train.rows)

    @property
    def validation_rows(self) -> range:
        """The rows that decide which model to keep; may be empty."""
        parts = self.manifest.parts
        return range(parts.train.rows, parts.train.rows + parts.validation.rows)

    def test_rows(self, part: str) -> range:
        """The rows that evaluations score: by `part`, `day`, `first_half` or `validation`.

        `day` is the whole test part; without a split, all rows. `first_half`, on which
        facebookresearch/dlrm tests, includes the middle row of an odd number, like np.array_split.

        Raises:
            ConfigError: `part` is `validation`, and there are no such rows.
            ValueError: `part` is none of these.
        """
        if part == "validation":
            if not self.validation_rows:
                raise ConfigError(
                    f"data.test_part = validation: the rows of {self.folder} have no such part"
                )
            return self.validation_rows
        start, stop = self.validation_rows.stop, self.manifest.rows
        if self.schema.is_progressive:
            start = 0
        if part == "day":
            return range(start, stop)
        if part == "first_half":
            return range(start, start + (stop - start + 1) // 2)
        raise ValueError(f"data.test_part is day, first_half or validation, not {part!r}")

    def scored_rows(self, test_part: str) -> dict[ScoredPart, range]:
        """The rows of each part that the evaluations of a run score.

        The first part is scored by every evaluation and decides which model is best; the other is
        scored at the end only. Validation rows come first if there are any.

        Args:
            test_part: `part` of `test_rows`; with `validation` no other part is scored.
        """
        rows = self.test_rows(test_part)
        if test_part == "validation":
            return {ScoredPart.VALIDATION: rows}
        if self.validation_rows:
            return {ScoredPart.VALIDATION: self.validation_rows, ScoredPart.TEST: rows}
        return {ScoredPart.TEST: rows}

    def steps_per_epoch(self, batch_size: int, trainers: int) -> int:
        """Number of global batches in the training rows; raises ConfigError if there is none."""
        rows, global_rows = len(self.train_rows), trainers * batch_size
        if rows < global_rows:
            raise ConfigError(
                f"train.batch_size = {batch_size}: a step of {trainers} trainer(s) takes "
                f"{global_rows:,} rows, but the training part of {self.folder} has only {rows:,}"
            )
        return rows // global_rows

    def read(self, rows: range) -> StoredRows:
        """Consecutive rows as views; raises IndexError if there are no such rows."""
        if rows.step != 1 or rows.start < 0 or rows.stop > self.manifest.rows:
            raise IndexError(f"{rows} is not a run of the {self.manifest.rows} rows")
        return self.rows.slice(rows.start, rows.stop)

    def vectors(self, of: Vectors) -> Iterator[tuple[Array, Array]]:
        """Ids that have vectors, and the vectors, in blocks; DataError if they are damaged."""
        arrays = [(array, open_array(self.folder, array)) for array in (of.ids, of.values)]
        for block, first in enumerate(range(0, of.ids.rows, BLOCK_ROWS)):
            for array, rows in arrays:
                _check_block(self.folder, array, rows, block)
            ids_K, values_KD = (rows[first : first + BLOCK_ROWS] for _, rows in arrays)
            yield ids_K, values_KD

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing that the rows were made with."""
        return Preprocessing(self.folder, self.manifest)

    def bad_lists(self, rows: StoredRows) -> bool:
        """Whether a list of ids in these rows is damaged, so that no model can be trained on it."""
        return any(bad_R.any() for bad_R in _bad_lists(rows, self.manifest))

    def fault(self, rows: Iterable[int]) -> DataError:
        """The error for the first of these rows that is damaged: no model can be trained on it."""
        for row in rows:
            fault = _first_fault(self.read(range(row, row + 1)), self.manifest)
            if fault is not None:
                path = self.folder / fault.file
                return DataError(f"{path}: row {row:,} (counted from 0): {fault.what}; {DAMAGED}")
        return DataError(f"{self.folder}: rows changed while they were read; {DAMAGED}")


def _bad_lists(rows: StoredRows, manifest: Manifest) -> list[Bools]:
    schema = manifest.schema
    return [
        lists.are_bad(manifest.table_rows[column], schema.categorical[column].max_length)
        for column, lists in zip(schema.multi_hot, rows.lists, strict=True)
    ]


def bad_weights(weight_R: Float32s) -> Bools:
    """Mask of the weights that are negative or not finite."""
    return ~((weight_R >= 0) & np.isfinite(weight_R))


class _Fault(NamedTuple):
    """A damaged value, on which no model can be trained: its row, its file and what is wrong."""

    row: int
    file: str
    what: str


def _first_fault(rows: StoredRows, manifest: Manifest) -> _Fault | None:
    """The first fault in some rows, if any; its `row` counts from the first of them."""
    schema, table_rows = manifest.schema, manifest.table_rows
    single = schema.single
    sizes_F = np.array([table_rows[column] for column in single], np.int64)
    lists = _bad_lists(rows, manifest)
    weight_R = np.ones(len(rows.label_R), np.float32) if rows.weight_R is None else rows.weight_R
    label_RL = rows.label_R.reshape(-1, len(schema.labels))
    masks = (
        (label_RL != 0) & (label_RL != 1),
        bad_weights(weight_R)[:, None],
        ~np.isfinite(rows.dense_RI),
        (rows.ids_RF < 0) | (rows.ids_RF >= sizes_F),
    )
    faulty = np.flatnonzero(np.logical_or.reduce([*(mask.any(axis=1) for mask in masks), *lists]))
    if not len(faulty):
        return None
    row = int(faulty[0])
    for number in np.flatnonzero(masks[0][row])[:1].tolist():
        name = f" {[*schema.loss_weights][number]!r}:" if schema.loss_weights else ""
        text = f"label{name} {label_RL[row, number]:g} is neither 0 nor 1"
        return _Fault(row, "label.npy", text)
    if masks[1][row, 0]:
        text = f"weight {weight_R[row]:g} is not finite, or below 0"
        return _Fault(row, manifests.WEIGHT_FILE, text)
    for number in np.flatnonzero(masks[2][row]):
        name = schema.inputs[int(number)].name
        return _Fault(row, "dense.npy", f"{name} is {rows.dense_RI[row, number]:g}")
    for column, bad_R in zip(schema.multi_hot, lists, strict=True):
        if bad_R[row]:
            bag = schema.categorical[column]
            text = (
                f"{bag.name} has more than {bag.max_length} ids, or one for which its table "
                f"has no row: it has {table_rows[column]}"
            )
            text += ", or a weight that is not finite" if column in schema.weighted else ""
            return _Fault(row, manifests.values_file(column), text)
    number = int(np.flatnonzero(masks[3][row])[0])
    name, size = schema.categorical[single[number]].name, sizes_F[number]
    text = f"{name} is {rows.ids_RF[row, number]}, its table has {size} rows"
    return _Fault(row, "ids.npy", text)


def _list_files(schema: Schema) -> list[list[str]]:
    """Names of the files of each multi-hot column, in the order of `Lists`."""
    return [
        [manifests.offsets_file(column), manifests.values_file(column)]
        + [manifests.weights_file(column)] * (column in schema.weighted)
        for column in schema.multi_hot
    ]


def open_shards(folder: Path, expected: Semantics | None) -> Shards:
    """Open prepared rows after checking all sizes and the checksums of a random sample of blocks.

    Args:
        expected: options the rows must have been made with; None accepts any.

    Raises:
        DataError: no manifest, other options than expected, or a file is missing, cut or altered.
    """
    manifest = manifests.read(folder)
    if differences := [] if expected is None else manifest.semantics.differences(expected):
        raise DataError(
            f"{folder}: made with other options ({'; '.join(differences)});"
            " run `prepare` again or name another folder in data.prepared"
        )
    if fault := manifests.size_fault(folder, manifest):
        raise DataError(f"{fault}; {DAMAGED}")
    label_R, dense_RI, ids_RF = (
        open_array(folder, manifest.array(file)) for file in ("label.npy", "dense.npy", "ids.npy")
    )
    schema = manifest.schema
    lists = tuple(
        Lists(*(open_array(folder, manifest.array(file)) for file in files))
        for files in _list_files(schema)
    )
    beside = ((manifests.WEIGHT_FILE, schema.weight), (manifests.GROUP_FILE, schema.group))
    weight_R, group_R = (
        None if column is None else open_array(folder, manifest.array(file))
        for file, column in beside
    )
    rows = StoredRows(label_R, dense_RI, ids_RF, lists, weight_R, group_R)
    shards = Shards(folder, manifest, rows)
    blocks = [
        (file, block)
        for file, array in enumerate(manifest.arrays)
        for block in range(len(array.blocks))
    ]
    # A new sample each time, so that damage is found sooner or later.
    sampled = np.random.default_rng().permutation(len(blocks))[:SAMPLED_BLOCKS]
    maps: dict[int, Array] = {}
    for index in np.sort(sampled):
        file, block = blocks[int(index)]
        if file not in maps:
            maps[file] = open_array(folder, manifest.arrays[file])
        _check_block(folder, manifest.arrays[file], maps[file], block)
    return shards


def verify(shards: Shards, progress: Callable[[int], None]) -> None:
    """Read all files of a prepared folder and compare them with the manifest.

    Args:
        progress: called with the number of rows read so far.

    Raises:
        DataError: the first row, block or file that is not what `prepare` wrote.
    """
    manifest = shards.manifest
    arrays = [open_array(shards.folder, array) for array in manifest.arrays]
    for block in range(max(len(array.blocks) for array in manifest.arrays)):
        for file, array in enumerate(manifest.arrays):
            if block < len(array.blocks):
                _check_block(shards.folder, array, arrays[file], block)
        first = block * BLOCK_ROWS
        if first >= manifest.rows:
            continue
        rows = shards.read(range(first, min(first + BLOCK_ROWS, manifest.rows)))
        if (fault := _first_fault(rows, shards.manifest)) is not None:
            raise shards.fault([first + fault.row])
        progress(first + len(rows.label_R))
    names = ("train", "validation", "test")
    first = 0
    for name, part in zip(names, manifest.parts, strict=True):
        clicks = np.count_nonzero(first_label(shards.rows.label_R[first : first + part.rows]))
        first += part.rows
        if clicks != part.clicks:
            path = shards.folder / "label.npy"
            raise DataError(
                f"{path}: does not match manifest.json: {clicks} clicks to {name}, not "
                f"{part.clicks}; {DAMAGED}"
            )
    for vectors in manifest.vectors:
        deque(shards.vectors(vectors), maxlen=0)
    shards.preprocessing.verified_vocabularies()


def _check_block(folder: Path, array: StoredArray, rows: Array, block: int) -> None:
    first = block * BLOCK_ROWS
    rows_of_block = rows[first : first + BLOCK_ROWS]
    if block_xxh3(rows_of_block) != array.blocks[block]:
        raise DataError(
            f"{folder / array.file}: rows {first:,} to {first + len(rows_of_block) - 1:,} "
            f"(counted from 0): checksum differs from manifest.json; {DAMAGED}"
        )
