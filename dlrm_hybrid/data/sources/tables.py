"""Prepares tables: files are read once into spilled columns by part, then assembled to arrays.

Rows keep the order of the files within their part. Categories get numbers by first appearance while
rows are read; which of them get ids is known at the end, when the arrays are written.

Shapes: N rows, I dense columns, F categorical columns, M ids of a column, V categories of one, D
distinct ones of a block.
"""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.arrays import Bools, Float32s, Float64s, Int32s, Int64s
from dlrm_hybrid.data.arrays import Array, ArrayWriter, StoredArray
from dlrm_hybrid.data.manifest import (
    GROUP_FILE,
    VOCABULARY_FOLDER,
    WEIGHT_FILE,
    Growth,
    Manifest,
    Scale,
    file_xxh3,
    offsets_file,
    values_file,
    weights_file,
)
from dlrm_hybrid.data.preprocessing import NO_ROW, Keys, Vocabulary, write_vocabulary
from dlrm_hybrid.data.schema import ByFile, ByFraction, ByTime, CategoricalColumn, Schema
from dlrm_hybrid.data.sources.cells import FORM, MISSING_INTEGER, Key, instant, missing_key, shown
from dlrm_hybrid.data.sources.columns import Coded, LabelValue, Values, numbers_of, standardised
from dlrm_hybrid.data.sources.files import Block, TableSource, check_names, open_source
from dlrm_hybrid.data.sources.paths import below, folder_values
from dlrm_hybrid.data.sources.raw import Prepared, PrepareJob
from dlrm_hybrid.data.sources.values import read_values, wanted_keys
from dlrm_hybrid.data.sources.vectors import VectorFile
from dlrm_hybrid.rng import fold, hashed
from dlrm_hybrid.types import DataError

PARTS = ("train", "validation", "test")
_MAX_CATEGORIES = 2**31 - 2


@dataclass(slots=True)
class _Moments:
    """Running count, mean and sum of squared deviations of each dense column.

    Source: Chan, Golub, LeVeque, Updating formulae for computing sample variances, 1979.
    """

    count: int = 0
    mean_I: Any = 0.0
    squares_I: Any = field(default=0.0)

    def add(self, x_NI: npt.NDArray[np.floating[Any]]) -> None:
        if not len(x_NI):
            return
        mean_I = x_NI.mean(axis=0)
        squares_I = ((x_NI - mean_I) ** 2).sum(axis=0)
        total, delta_I = self.count + len(x_NI), mean_I - self.mean_I
        self.mean_I = self.mean_I + delta_I * (len(x_NI) / total)
        self.squares_I = self.squares_I + squares_I
        self.squares_I = self.squares_I + delta_I**2 * (self.count * len(x_NI) / total)
        self.count = total

    def scales(self, schema: Schema) -> tuple[Scale | None, ...]:
        """Scale of each column, None unless it is standardised; a constant one is divided by 1."""
        scales: list[Scale | None] = []
        for index, column in enumerate(schema.inputs):
            if column.transform != "standardise":
                scales.append(None)
                continue
            deviation = float(np.sqrt(self.squares_I[index] / max(self.count, 1)))
            scales.append(Scale(mean=float(self.mean_I[index]), deviation=deviation or 1.0))
        return tuple(scales)


class Numbered(NamedTuple):
    """The categories of a column that have rows of its table.

    Attributes:
        keys: these categories, in the order of their ids.
        id_V: int32, the id of each number; 0 without a row.
        use_V: see `Vocabulary`.
    """

    keys: Keys
    id_V: Int32s
    growth: Growth
    use_V: Int64s | None


@final
class Numbering:
    """Numbers the categories of a column by first appearance and counts them in known rows."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._counts = np.zeros(1 << 10, np.int64)

    def add(self, coded: Coded, known_M: Bools | None) -> Int32s:
        """The number of each id; those that `known_M` selects are counted, all if it is None."""
        numbers: dict[Key, int] = self._numbers
        keys = coded.keys
        index_M = coded.index_M if known_M is None else coded.index_M[known_M]
        number_D = np.zeros(len(keys), np.int64)
        positions = _by_appearance(coded)
        number_D[positions] = [numbers.setdefault(keys[place], len(numbers)) for place in positions]
        if len(numbers) > _MAX_CATEGORIES:
            raise DataError(f"more than {_MAX_CATEGORIES} categories in one column")
        if len(numbers) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(len(numbers), np.int64)])
        np.add.at(self._counts, number_D, np.bincount(index_M, minlength=len(keys)))
        return number_D[coded.index_M].astype(np.int32)

    def vocabulary(
        self,
        column: CategoricalColumn,
        shared: bool,
        base: Vocabulary | None = None,
        grows: bool = True,
    ) -> Numbered:
        """Decide which categories get rows of the table.

        These are the categories of the base, then new ones counted often enough and, after them,
        all other buckets of a hashed column, as later rows may have values in them. Where the table
        is full, the most frequent new ones take the rows of those least in use (`evict`).

        Args:
            shared: whether id 0 is for all other categories.
            base: categories of earlier rows, which keep their ids.
            grows: whether categories that the base lacks get rows.
        """
        categories = list(self._numbers)
        has_own_V = np.ones(len(categories), bool)  # False if it shares id 0 by the schema
        if column.missing == "shared" and (key := missing_key(column)) in self._numbers:
            has_own_V[self._numbers[key]] = False
        known_V = np.full(len(categories), NO_ROW) if base is None else base.lookup()(categories)
        is_new_V = has_own_V & (known_V == NO_ROW) & grows
        counts_V = self._counts[: len(categories)]
        is_new_V &= counts_V >= max(1, column.min_count)
        first = int(shared) if base is None else base.table_rows
        late = np.empty(0, np.int64)  # the new ones that the table has no more rows for
        if column.max_rows is not None:
            by_count = np.argsort(np.where(is_new_V, -counts_V, 1), kind="stable")
            late = by_count[max(0, column.max_rows - first) : np.count_nonzero(is_new_V)]
            is_new_V[late] = False
        has_row_V = is_new_V | (known_V != NO_ROW)
        id_V = np.where(is_new_V, first - 1 + np.cumsum(is_new_V), known_V) * has_row_V
        appears = zip(categories, is_new_V.tolist(), strict=True)
        new_keys: list[Key] = [key for key, is_new in appears if is_new]
        use_V, rows = None, late[:0]
        if column.evict is not None:
            use_V, seen_use_V = _use(column, base, known_V, counts_V, is_new_V)
            rows = _rows_to_take(use_V[: len(use_V) - len(new_keys)], seen_use_V[late])
            late = late[: len(rows)]
            use_V[rows] = seen_use_V[late]
            has_row_V &= ~np.isin(known_V, rows + int(shared))
            id_V *= has_row_V
            has_row_V[late], id_V[late] = True, rows + int(shared)
            new_keys = [*(categories[number] for number in late.tolist()), *new_keys]
        keys: Keys = new_keys if base is None else base.having(rows, new_keys).keys
        if column.hash_size and column.min_count <= 1 and grows:
            keys, id_of_place = _all_buckets(np.array(keys, np.int64), column, shared)
            id_V = np.where(has_row_V, id_V, id_of_place[_places(categories, column)])
            has_row_V = has_own_V
        reused, unknown, total = (
            int(np.count_nonzero(mask))
            for mask in ((known_V != NO_ROW) & has_row_V, has_own_V & ~has_row_V, has_own_V)
        )
        appended = total - reused - unknown - len(rows)
        growth = Growth(reused=reused, appended=appended, unknown=unknown, evicted=len(rows))
        return Numbered(keys, id_V.astype(np.int32), growth, use_V)


def _use(
    column: CategoricalColumn,
    base: Vocabulary | None,
    known_V: Int64s,
    counts_V: Int64s,
    is_new_V: Bools,
) -> tuple[Int64s, Int64s]:
    """The use of a column's categories after these rows; see `Vocabulary.use_V`.

    Args:
        known_V: id in the base of each category that was seen.
        counts_V: how often it was seen where rows are counted.
        is_new_V: whether it gets a row behind the rows of the base.

    Returns:
        The use of all categories with rows, the base's first, and of each category seen.
    """
    before_V = np.zeros(0 if base is None else len(base.keys), np.int64)
    if base is not None and base.use_V is not None and base.column.evict == column.evict:
        before_V = base.use_V.copy()
    is_known_V = known_V != NO_ROW
    row_V = known_V[is_known_V] - (0 if base is None else base.first_id)
    use_V = counts_V.copy()
    if column.evict == "rarest":
        use_V[is_known_V] += before_V[row_V]
    else:
        use_V = np.where(counts_V > 0, before_V.max(initial=0) + 1, 0)
        use_V[is_known_V] = np.maximum(use_V[is_known_V], before_V[row_V])
    before_V[row_V] = use_V[is_known_V]
    return np.concatenate([before_V, use_V[is_new_V]]), use_V


def _rows_to_take(use_V: Int64s, more_N: Int64s) -> Int64s:
    """The rows of the categories least in use that N others of more use take, by falling use.

    Of rows equally little in use the last are taken: categories that came early are seen often.
    """
    least_V = np.lexsort((-np.arange(len(use_V)), use_V))[: len(more_N)]
    return least_V[more_N[: len(least_V)] > use_V[least_V]]


def _places(keys: Keys, column: CategoricalColumn) -> Int64s:
    """The places of a hashed column's keys: buckets, and behind them the missing value."""
    keys_V = np.asarray(keys, np.int64)
    return np.where(keys_V == MISSING_INTEGER, column.hash_size, keys_V)


def _all_buckets(held_V: Int64s, column: CategoricalColumn, shared: bool) -> tuple[Int64s, Int64s]:
    """The keys of a hashed column, then all other buckets, and ids of the buckets by place."""
    size = column.hash_size
    is_other = np.arange(size + 1) < size + (column.missing == "own")
    is_other[_places(held_V, column)] = False
    places = np.flatnonzero(is_other)
    id_of_place = np.zeros(size + 1, np.int64)
    id_of_place[places] = np.arange(len(places)) + len(held_V) + shared
    return np.append(held_V, np.where(places == size, MISSING_INTEGER, places)), id_of_place


def _by_appearance(coded: Coded) -> list[int]:
    """Indices of the keys that occur, in order of appearance; Arrow's order may be another."""
    nowhere = len(coded.index_M)
    first_D = np.full(len(coded.keys), nowhere)
    first_D[coded.index_M[::-1]] = np.arange(nowhere - 1, -1, -1)  # the last write wins: the first
    order_D = np.argsort(first_D, kind="stable")
    return order_D[: int(np.count_nonzero(first_D < nowhere))].tolist()


@final
class Spill:
    """Temporary columns of all parts in one file, as a table may have thousands of columns."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w+b")
        self._pieces: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
        self._end = 0

    def __enter__(self) -> Spill:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, part: str, name: str, values: Array) -> None:
        """Add a piece to a part's column."""
        self._file.seek(self._end)
        self._file.write(np.ascontiguousarray(values).data)
        self._pieces[part, name].append((self._end, values.size))
        self._end += values.nbytes

    def read(self, part: str, name: str, dtype: type[np.generic]) -> Iterator[Array]:
        """Yield the pieces of a part's column in order, as flat arrays."""
        for place, size in self._pieces[part, name]:
            values = np.empty(size, dtype)
            self._file.seek(place)
            if self._file.readinto(values.data) != values.nbytes:
                raise OSError(f"{self._file.name}: a temporary file ends before its end")
            yield values


def prepare_tables(job: PrepareJob) -> Prepared:
    """Make arrays and vocabularies from tables.

    Raises:
        DataError: a file is damaged or has other columns; a bad row is not allowed; a part that
            the split needs has no rows.
    """
    schema, base = job.schema, job.options.base
    if base is not None and (faults := list(_base_faults(job, base.manifest))):
        raise DataError(
            "\n  ".join([f"{base.folder}: no base for these rows (data.base)", *faults])
        )
    firsts, columns = schema.first_columns, schema.categorical
    indices = [index for index, column in enumerate(columns) if column.vectors is not None]
    files = [VectorFile.open(index, columns[index]) for index in indices]
    earlier = [None] * len(columns) if base is None else base.vocabularies()
    numberings = {first: Numbering() for first in firsts}
    moments = _Moments()
    with Spill(job.partial.spill / "columns.bin") as spill:
        rows, xxh3 = _read(job, spill, numberings, moments)
        job.check_unchanged()
        folder = job.partial.result / VOCABULARY_FOLDER
        scales = moments.scales(schema) if base is None else base.manifest.scales
        folder.mkdir()
        of_table = {
            first: numbering.vocabulary(
                columns[first], job.shares_id[first], earlier[first], job.options.grows
            )
            for first, numbering in numberings.items()
        }
        tables = [of_table[first] for first in firsts]
        id_of = [table.id_V for table in tables]
        digests = {
            first: write_vocabulary(folder, first + 1, table.keys, columns[first], table.use_V)
            for first, table in of_table.items()
        }
        arrays = list(_single(job, spill, scales, id_of, job.counter("assemble", sum(rows))))
        for index in schema.multi_hot:
            arrays += _multi_hot(index, spill, job, id_of[index])
    return Prepared(
        xxh3=xxh3,
        rows=rows,
        arrays=tuple(arrays),
        table_rows=tuple(
            max(1, len(table.keys) + shared)
            for table, shared in zip(tables, job.shares_id, strict=True)
        ),
        vocabulary_xxh3=xxhash.xxh3_128_hexdigest(b"".join(digests[first] for first in firsts)),
        scales=scales,
        growth=() if base is None else tuple(table.growth for table in tables),
        vectors=tuple(
            file.write(
                job.partial.result,
                Vocabulary(file.column, tables[file.number].keys, int(job.shares_id[file.number])),
            )
            for file in files
        ),
    )


def _base_faults(job: PrepareJob, base: Manifest) -> Iterator[str]:
    """Reasons why rows cannot have an earlier vocabulary or scale, each with its key."""
    schema = job.schema
    yield from base.schema.other_meaning(schema)
    if len(schema.categorical) != len(base.schema.categorical):
        return
    columns = zip(
        schema.categorical, job.options.semantics.shares_id, base.out_of_vocabulary, strict=True
    )
    for index, (column, shares, base_shares) in enumerate(columns):
        if base_shares or not (shares or (not job.options.grows and not column.hash_size)):
            continue
        yield (
            f"data.schema.categorical[{index}]: {column.name!r} may have categories without a row "
            "(min_count, max_rows, missing: shared, vocabulary: train, data.grow=false), and the "
            "base has none that they share: give it none of these, and vocabulary: all"
        )


def _read(
    job: PrepareJob, spill: Spill, numberings: Mapping[int, Numbering], moments: _Moments
) -> tuple[tuple[int, int, int], list[str]]:
    """Read all files into the spill; returns rows of each part and xxh3 of each file."""
    schema, counts, report = job.schema, job.counts, job.counter("read", None)
    rows_3, weights_3 = np.zeros(3, np.int64), np.zeros(3)
    digests, absent = (
        list[str](),
        {LabelValue(of, key) for of in schema.labels for key in wanted_keys(of)},
    )
    for file, (path, name) in enumerate(zip(job.raw, below(job.raw), strict=True)):
        digest = xxhash.xxh3_128()
        before = sum(entry.rows for entry in counts.files)
        source = open_source(path, schema.dialect, job.options.block_bytes, digest.update)
        for block in _blocks(source, path, schema):
            values, bad = read_values(block, schema, str(path), labels=True)
            for row in bad:
                counts.set_aside(file, f": {row.where}", row.raw.encode())
            part_N = parts(values, schema, name, before)
            _put(spill, values, part_N, numberings, schema, moments)
            rows_3 += np.bincount(part_N, minlength=3)
            weights_3 += np.bincount(part_N, values.weight_N, minlength=3)
            counts.keep(file, len(values.row_N), block.remark)
            absent -= values.positives
            report(len(values.row_N) + len(bad))
        digests.append(digest.hexdigest() if source.is_text else file_xxh3(path))
    for label in schema.labels:
        if keys := sorted((value.key for value in absent if value.label == label), key=str):
            names = " or ".join(map(shown, keys))
            counts.remarks.append(f"no row has {label.column} = {names} (positive, data.schema)")
    train, validation, test = rows_3.tolist()
    _check_parts({"train": train, "validation": validation, "test": test}, schema, job.raw)
    for part, rows, weight in zip(PARTS, rows_3, weights_3, strict=True):
        if rows and not weight:
            raise DataError(
                f"{job.raw[0]}: column {schema.weight!r}: no row of the part `{part}` has a weight "
                "above 0 (weight, data.schema)"
            )
    return (train, validation, test), digests


def _blocks(source: TableSource, path: Path, schema: Schema) -> Iterator[Block]:
    required = schema.read_columns
    allowed = {*required, *schema.ignore, *folder_values(path)}
    check_names(path, source.names, required, allowed)
    return source.blocks(required)


def _check_parts(rows: dict[str, int], schema: Schema, raw: Sequence[Path]) -> None:
    split = schema.split
    part_names = ["train"] if split is None else ["train", "test"]
    if isinstance(split, ByTime):
        part_names += ["validation"] * (split.validation_from is not None)
    elif split is not None and split.validation:
        part_names.append("validation")
    for part in part_names:
        if not rows[part]:
            count = ", ".join(f"{number:,} to {name}" for name, number in rows.items())
            raise DataError(
                f"{raw[0]}: no rows (data.raw)"
                if split is None
                else f"{raw[0]}: no rows for the part `{part}` ({count}): see split (data.schema)"
            )


def parts(values: Values, schema: Schema, name: str, before: int) -> npt.NDArray[np.int8]:
    """The part of each row: 0 training, 1 validation, 2 test.

    Args:
        name: path of the file below the folder that all files share.
        before: number of rows in the files before it.
    """
    split, count = schema.split, len(values.row_N)
    if split is None:
        return np.zeros(count, np.int8)
    if isinstance(split, ByFile):
        names = (name, name.rpartition("/")[2])
        for part, patterns in ((2, split.test), (1, split.validation)):
            if any(fnmatch.fnmatch(path, pattern) for pattern in patterns for path in names):
                return np.full(count, part, np.int8)
        return np.zeros(count, np.int8)
    if isinstance(split, ByFraction):
        drawn_N = _drawn(split, values.row_N + before, values.drawn_N)
        test_N = drawn_N < split.test
        return np.where(test_N, 2, drawn_N < split.test + split.validation).astype(np.int8)
    assert isinstance(split, ByTime) and values.time_N is not None
    part_N = np.zeros(count, np.int8)
    for part, border in ((1, split.validation_from), (2, split.test_from)):
        if border is not None:
            part_N[values.time_N >= _comparable(border)] = part
    return part_N


def _drawn(split: ByFraction, number_N: Int64s, hash_N: Int64s | None) -> Float64s:
    """Numbers in [0, 1) by the rows' numbers, or by hashes where these are not 0."""
    bits_N = hashed(fold(split.seed, "split"), number_N.view(np.uint64))
    if hash_N is not None:
        by_value_N = hashed(fold(split.seed, "split by value"), hash_N.view(np.uint64))
        bits_N = np.where(hash_N, by_value_N, bits_N)
    return (bits_N >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _comparable(border: float | str) -> float:
    if not isinstance(border, str):
        return border
    moment = instant(border)
    if moment is None:
        raise DataError(f"split: {border!r} is not {FORM} (data.schema)")
    return moment


def _put(
    spill: Spill,
    values: Values,
    part_N: npt.NDArray[np.int8],
    numberings: Mapping[int, Numbering],
    schema: Schema,
    moments: _Moments,
) -> None:
    train_N = part_N == 0
    moments.add(values.dense_NI if train_N.all() else values.dense_NI[train_N])
    known_N = None if schema.vocabulary == "all" else train_N
    assert values.label_N is not None
    masks = [(name, part_N == part) for part, name in enumerate(PARTS)]
    masks = [(name, mask) for name, mask in masks if mask.any()]
    for name, mask in masks:
        spill.write(name, "label", values.label_N[mask])
        spill.write(name, "dense", values.dense_NI[mask])
        for file, beside_N in ((WEIGHT_FILE, values.weight_N), (GROUP_FILE, values.group_N)):
            if beside_N is not None:
                spill.write(name, file, beside_N[mask])
    columns_of: defaultdict[int, list[int]] = defaultdict(list)
    for index, first in enumerate(schema.first_columns):
        columns_of[first].append(index)
    for first, columns in columns_of.items():
        several = [values.categories[index] for index in columns]
        numbers = numbers_of(numberings[first].add, several, known_N)
        for index, coded, number_M in zip(columns, several, numbers, strict=True):
            length_N = coded.length_N
            for name, mask in masks:
                mask_M = mask if length_N is None else np.repeat(mask, length_N)
                spill.write(name, f"ids{index}", number_M[mask_M])
                if length_N is not None:
                    spill.write(name, f"lengths{index}", length_N[mask])
                if coded.weight_M is not None:
                    spill.write(name, f"weights{index}", coded.weight_M[mask_M])


def _single(
    job: PrepareJob,
    spill: Spill,
    scales: Sequence[Scale | None],
    id_of: Sequence[Int32s],
    report: Callable[[int], None],
) -> Iterator[StoredArray]:
    schema, result = job.schema, job.partial.result
    width, single = schema.num_dense, schema.single
    with (
        ArrayWriter(result / "label.npy", np.float32, len(schema.loss_weights) or None) as label,
        ArrayWriter(result / "dense.npy", np.float32, width) as dense,
        ArrayWriter(result / "ids.npy", np.int32, len(single)) as ids,
    ):
        for part in PARTS:
            columns = [
                spill.read(part, "label", np.float32),
                spill.read(part, "dense", np.float64),
                *(spill.read(part, f"ids{index}", np.int32) for index in single),
            ]
            for label_N, x_NI, *numbers in zip(*columns, strict=True):
                rows = len(label_N) // len(schema.labels)
                label.append(label_N.reshape(rows, -1) if schema.loss_weights else label_N)
                dense.append(_standardised(x_NI.reshape(rows, width), scales, schema, part))
                ids_NF = np.empty((rows, len(single)), np.int32)
                for place, index in enumerate(single):
                    ids_NF[:, place] = id_of[index][numbers[place]]
                ids.append(ids_NF)
                report(rows)
        yield from (label.finish(), dense.finish(), ids.finish())
    beside = ((WEIGHT_FILE, schema.weight, np.float32), (GROUP_FILE, schema.group, np.int64))
    for file, column, dtype in beside:
        if column is not None:
            yield from _beside(result / file, spill, file, dtype)


def _beside(path: Path, spill: Spill, name: str, dtype: type[np.generic]) -> Iterator[StoredArray]:
    """Write a spilled column as it is."""
    with ArrayWriter(path, dtype) as array:
        for part in PARTS:
            for values in spill.read(part, name, dtype):
                array.append(values)
        yield array.finish()


def _standardised(
    dense_NI: Float64s, scales: Sequence[Scale | None], schema: Schema, part: str
) -> Float32s:
    x_NI = standardised(dense_NI, scales)
    for row, column in np.argwhere(~np.isfinite(x_NI))[:1].tolist():
        raise DataError(
            f"column {schema.inputs[column].name!r}: {dense_NI[row, column]} of the part `{part}` "
            "is outside 32 bits once it is standardised (data.raw)"
        )
    return x_NI


def _multi_hot(index: int, spill: Spill, job: PrepareJob, id_V: Int32s) -> Iterator[StoredArray]:
    result = job.partial.result
    with (
        ArrayWriter(result / values_file(index), np.int32) as values,
        ArrayWriter(result / offsets_file(index), np.int64) as offsets,
    ):
        end = 0
        offsets.append(np.zeros(1, np.int64))
        for part in PARTS:
            for length_N in spill.read(part, f"lengths{index}", np.int32):
                offset_N = end + np.cumsum(length_N, dtype=np.int64)
                end = int(offset_N[-1])
                offsets.append(offset_N)
            for number_M in spill.read(part, f"ids{index}", np.int32):
                values.append(id_V[number_M])
        yield from (values.finish(), offsets.finish())
    if index in job.schema.weighted:
        file = result / weights_file(index)
        yield from _beside(file, spill, f"weights{index}", np.float32)
