"""Vocabularies of tables: numbered while rows are prepared, stored as .npy, looked up afterwards.

`vocabulary/<n>.npy` has the categories of categorical column n, from 1, in the order of their ids,
without one for a shared id 0: text as UTF-8 bytes, concatenated, with `<n>.offsets.npy` (V + 1)
that says where each begins; whole numbers, and hashes, as int64; `hash8` as uint32. A missing value
is the empty text, -2**63 or 0.

Shapes: N rows, V categories of a column, D distinct ones of a block, F categorical columns, M ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid import disk
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.arrays import header
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER, Manifest, Scale
from dlrm_hybrid.data.schema import CategoricalColumn, Schema
from dlrm_hybrid.data.sources.values import MISSING, MISSING_INTEGER, Coded, Key, Values
from dlrm_hybrid.types import DataError

_MAX_CATEGORIES = 2**31 - 2


@final
class Numbers:
    """Numbers the categories of a column by first appearance, and counts the known rows' ones."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._counts = np.zeros(1 << 10, np.int64)

    def add(self, coded: Coded, known_M: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int32]:
        """The number of each id; `known_M` says which ones count, None: all."""
        numbers, keys = self._numbers, coded.keys
        seen = coded.index_M if known_M is None else coded.index_M[known_M]
        number_D = np.zeros(len(keys), np.int64)
        for position in _by_appearance(coded):
            number_D[position] = numbers.setdefault(keys[position], len(numbers))
        if len(numbers) > _MAX_CATEGORIES:
            raise DataError(f"more than {_MAX_CATEGORIES} categories in one column")
        if len(numbers) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(len(numbers), np.int64)])
        np.add.at(self._counts, number_D, np.bincount(seen, minlength=len(keys)))
        return number_D[coded.index_M].astype(np.int32)

    def vocabulary(self, least: int, shared: bool) -> tuple[list[Key], npt.NDArray[np.int32]]:
        """The categories with at least so many known ids, and the id of each number.

        Args:
            least: times that a category must have been counted.
            shared: whether id 0 is for all others.
        """
        kept_V = self._counts[: len(self._numbers)] >= least
        id_V = (np.cumsum(kept_V) - 1 + shared) * kept_V
        keys = [key for key, kept in zip(self._numbers, kept_V.tolist(), strict=True) if kept]
        return keys, id_V.astype(np.int32)


def _by_appearance(coded: Coded) -> list[int]:
    """The keys that occur, in the order of their first ids; those of Arrow may be in any."""
    nowhere = len(coded.index_M)
    first_D = np.full(len(coded.keys), nowhere)
    first_D[coded.index_M[::-1]] = np.arange(nowhere - 1, -1, -1)  # the last one to write is first
    order_D = np.argsort(first_D, kind="stable")
    return order_D[: int(np.count_nonzero(first_D < nowhere))].tolist()


def write_vocabulary(
    folder: Path, number: int, keys: Sequence[Key], column: CategoricalColumn
) -> bytes:
    """Write the categories of column `number`, from 1; the xxh3-128 of what the files hold."""
    arrays: dict[str, npt.NDArray[Any]]
    if column.hash_size or column.kind != "string":
        kind = np.uint32 if column.kind == "hash8" and not column.hash_size else np.int64
        arrays = {f"{number}.npy": np.array(keys, kind)}
    else:
        encoded = [str(key).encode() for key in keys]
        offsets = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(one) for one in encoded], out=offsets[1:])
        content = np.frombuffer(b"".join(encoded), np.uint8)
        arrays = {f"{number}.npy": content, f"{number}.offsets.npy": offsets}
    digest = xxhash.xxh3_128()
    for name, array in arrays.items():
        payload = array.reshape(-1).view(np.uint8).data
        digest.update(payload)
        disk.write(folder / name, [memoryview(header(array.dtype.str, array.shape)), payload])
    return digest.digest()


def read_vocabulary(folder: Path, number: int, column: CategoricalColumn) -> list[Key]:
    """The categories of column `number`, from 1, in the order of their ids.

    Args:
        folder: of the vocabularies.
        number: of the column.
        column: what the schema says of it.

    Raises:
        DataError: there are none, or they are damaged.
    """
    path = folder / f"{number}.npy"
    try:
        content = np.load(path, allow_pickle=False)
        if column.hash_size or column.kind != "string":
            return content.tolist()
        offsets = np.load(folder / f"{number}.offsets.npy", allow_pickle=False).tolist()
        text = content.tobytes()
        return [
            text[first:stop].decode() for first, stop in zip(offsets, offsets[1:], strict=False)
        ]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: no vocabulary of {column.name!r}: {error}") from error


def standardised(
    dense_NI: npt.NDArray[np.float64], scales: Sequence[Scale | None]
) -> npt.NDArray[np.float32]:
    """Dense values as a model takes them: (x - mean) / deviation where a column has these."""
    means = np.array([0.0 if one is None else one.mean for one in scales])
    deviations = np.array([1.0 if one is None else one.deviation for one in scales])
    return ((dense_NI - means) / deviations).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Rows of any source to batches, by the vocabularies of rows that were prepared before.

    Attributes:
        schema: the columns.
        scales: of the dense columns.
        ids: id of each category, for each categorical column.
        shared: whether id 0 of a column is for all that its vocabulary lacks.
        unknown: what becomes of a category that a column without such an id lacks: an `error`, or
            the id of a `missing` value.
    """

    schema: Schema
    scales: tuple[Scale | None, ...]
    ids: tuple[dict[Key, int], ...]
    shared: tuple[bool, ...]
    unknown: Literal["error", "missing"] = "error"

    @classmethod
    def of(
        cls, folder: Path, manifest: Manifest, unknown: Literal["error", "missing"] = "error"
    ) -> Encoder:
        """That of a folder of prepared rows.

        Raises:
            DataError: a vocabulary is missing or damaged.
        """
        schema, shared = manifest.schema, manifest.out_of_vocabulary
        ids: list[dict[Key, int]] = []
        for number, column in enumerate(schema.categorical, 1):
            keys = read_vocabulary(folder / VOCABULARY_FOLDER, number, column)
            first = int(shared[number - 1])
            ids.append({key: first + position for position, key in enumerate(keys)})
        return cls(schema, manifest.scales, tuple(ids), shared, unknown)

    def batch(self, values: Values) -> Batch:
        """The batch of some rows; labels are 0 where there are none.

        Raises:
            DataError: a category is unknown, and its column has no id for such; names both.
        """
        rows = len(values.row_N)
        label_N = np.zeros(rows, np.float32) if values.label_N is None else values.label_N
        dense_NI = standardised(values.dense_NI, self.scales)
        ids = [self._ids(column, coded) for column, coded in enumerate(values.categories)]
        if not self.schema.multi_hot:
            return Batch(dense_NI, Bags(np.stack(ids)), label_N)
        ones_N = np.ones(rows, np.int64)
        lengths = [ones_N if one.length_N is None else one.length_N for one in values.categories]
        offsets = np.zeros(rows * len(ids) + 1, np.int64)
        np.cumsum(np.concatenate(lengths), out=offsets[1:])
        return Batch(dense_NI, Bags(np.concatenate(ids), offsets, len(ids)), label_N)

    def _ids(self, column: int, coded: Coded) -> npt.NDArray[np.int64]:
        known, meant = self.ids[column], self.schema.categorical[column]
        present_D = np.bincount(coded.index_M, minlength=len(coded.keys)).tolist()
        id_D = np.zeros(len(coded.keys), np.int64)
        for position, (key, count) in enumerate(zip(coded.keys, present_D, strict=True)):
            found = known.get(key)
            if found is None and count and not self.shared[column]:
                found = self._unknown(key, known, meant)
            id_D[position] = found or 0
        return id_D[coded.index_M]

    def _unknown(self, key: Key, known: dict[Key, int], column: CategoricalColumn) -> int:
        missing = MISSING_INTEGER if column.hash_size else MISSING[column.kind]
        if self.unknown == "missing" and missing in known:
            return known[missing]
        raise DataError(
            f"column {column.name!r}: {key!r:.60} is not in its vocabulary, and it has no id for "
            "unknown categories (min_count > 1, or vocabulary: train, gives it one)"
        )
