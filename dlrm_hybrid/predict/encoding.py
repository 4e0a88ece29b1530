"""Categories to rows of tables by the vocabularies of a run; what to do with unknown ones.

Shapes: R rows, F categorical columns, M ids of a column, D distinct categories of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.bags import Bags, jagged
from dlrm_hybrid.data.encode import standardised
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.data.sources.cells import Key, missing_key
from dlrm_hybrid.data.sources.values import Coded, Values
from dlrm_hybrid.data.vocabulary import Table
from dlrm_hybrid.predict.sources import CriteoValues
from dlrm_hybrid.saved import vocabularies
from dlrm_hybrid.saved.vocabularies import Vocabulary

Ids = npt.NDArray[np.int64]
Unknown = Literal["error", "zero"]
_NO_ROW = -1


class UnknownCategoryError(Exception):
    """No row of a table stands for a category; `row` counts from 0."""

    def __init__(self, row: int, column: str, category: str) -> None:
        super().__init__(row, column, category)
        self.row = row
        self.column = column
        self.category = category


class OutOfRangeError(Exception):
    """A dense value is beyond 32 bits once it is standardised; `row` counts from 0."""

    def __init__(self, row: int, column: str) -> None:
        super().__init__(row, column)
        self.row = row
        self.column = column


@final
class Encoder:
    """Rows of any source to batches.

    An unknown category gets id 0 where that stands for all of them. Where no row does, it is an
    error, or gets the id after the last one, whose row in the model is to be zero.

    Args:
        preprocessing: whose vocabularies and scales are used.
        unknown: what happens to categories for which no row stands.

    Attributes:
        columns: names of the categorical columns.
        unknown_F: how many ids were unknown until now, by column; not empty values of columns
            with `missing: shared`.
    """

    def __init__(self, preprocessing: Preprocessing, unknown: Unknown) -> None:
        found = vocabularies.read(preprocessing)
        self._preprocessing = preprocessing
        self._scales = preprocessing.manifest.scales
        self._unknown = unknown
        self._sizes = preprocessing.table_rows
        self._shared = [one.first_id == 1 for one in found]
        modulo = preprocessing.manifest.semantics.max_ind_range or 0
        self._lookups = [_lookup(one, modulo) for one in found]
        self._is_hash8 = [one.is_hash8 for one in found]
        # Empty values that share a row were meant to, and say nothing of new categories.
        self._expected: list[Key | None] = [
            missing_key(one.column) if one.column.missing == "shared" else None for one in found
        ]
        self.columns = tuple(one.column.name for one in found)
        self.unknown_F = np.zeros(len(found), np.int64)

    @property
    def padded_rows(self) -> tuple[int, ...]:
        """Rows that the tables of a model need, with those of zeros."""
        pads = [self._unknown == "zero" and not shared for shared in self._shared]
        return tuple(size + pad for size, pad in zip(self._sizes, pads, strict=True))

    def batch(self, values: CriteoValues | Values) -> Batch:
        """The batch of some rows, with labels of 0.

        Raises:
            UnknownCategoryError: for the first row that has one for which no row stands.
            OutOfRangeError: for the first row with such a dense value.
        """
        if isinstance(values, CriteoValues):
            keys = [np.ascontiguousarray(keys_R) for keys_R in values.keys_FR]
            ids = [lookup(one) for lookup, one in zip(self._lookups, keys, strict=True)]
            self._settle(ids, keys, None)
            dense_RI = np.ascontiguousarray(values.dense_RI)
            bags = self._preprocessing.expanded(Bags(np.stack(ids)))
            return Batch(dense_RI, bags, np.zeros(len(dense_RI), np.float32))
        coded = values.categories
        ids = [
            lookup(one.keys)[one.index_M] for lookup, one in zip(self._lookups, coded, strict=True)
        ]
        self._settle(ids, None, coded)
        rows = len(values.row_N)
        one_R, lengths = np.ones(rows, np.int64), [one.length_N for one in coded]
        bags = Bags(np.stack(ids)) if all(one is None for one in lengths) else None
        if bags is None:
            lengths_FR = np.stack([one_R if one is None else one for one in lengths])
            bags = jagged(np.concatenate(ids), lengths_FR.astype(np.int64))
        dense_RI = standardised(values.dense_NI, self._scales)
        beyond: list[list[int]] = np.argwhere(~np.isfinite(dense_RI))[:1].tolist()
        for row, column in beyond:
            raise OutOfRangeError(row, self._preprocessing.schema.dense[column].name)
        return Batch(dense_RI, self._preprocessing.expanded(bags), np.zeros(rows, np.float32))

    def _settle(
        self,
        ids: Sequence[Ids],
        keys: Sequence[npt.NDArray[np.uint32]] | None,
        coded: Sequence[Coded] | None,
    ) -> None:
        """Give unknown categories an id, in place."""
        first: UnknownCategoryError | None = None
        for column, ids_M in enumerate(ids):
            unknown = np.flatnonzero(ids_M == _NO_ROW)
            expected = self._expected[column]
            self.unknown_F[column] += len(unknown)
            if coded is not None and expected is not None:
                places = [at for at, key in enumerate(coded[column].keys) if key == expected]
                meant_M = np.isin(coded[column].index_M, places)
                self.unknown_F[column] -= np.count_nonzero(meant_M)
            if self._shared[column] or not len(unknown):
                ids_M[unknown] = 0
                continue
            ids_M[unknown] = self._sizes[column]
            at = row = int(unknown[0])
            if keys is not None:
                category: Key = int(keys[column][at])
            else:
                assert coded is not None
                one = coded[column]
                category = one.keys[int(one.index_M[at])]
                if one.length_N is not None:
                    row = int(np.searchsorted(np.cumsum(one.length_N), at, "right"))
            if first is None or row < first.row:
                shown = f"{category:08x}" if self._is_hash8[column] else f"{category!r:.60}"
                first = UnknownCategoryError(row, self.columns[column], shown)
        if first is not None and self._unknown == "error":
            raise first


def _lookup(vocabulary: Vocabulary, modulo: int) -> Callable[[Sequence[Key] | Ids], Ids]:
    """What gives the id of each of some categories, or -1."""
    if not isinstance(vocabulary.keys, np.ndarray):
        known = {key: id for id, key in enumerate(vocabulary.keys, vocabulary.first_id)}
        return lambda keys: np.array([known.get(str(key), _NO_ROW) for key in keys], np.int64)
    if not vocabulary.is_hash8:
        return _number_lookup(vocabulary.keys.astype(np.int64), vocabulary.first_id)
    table = Table()
    table.insert(vocabulary.keys.copy(), 0)

    def find(keys: Sequence[Key] | Ids) -> Ids:
        found_D = np.array(keys, np.uint32)
        if 0 < modulo <= 0xFFFFFFFF:
            found_D %= np.uint32(modulo)
        table.lookup(found_D)  # 1 + number, 0 for unknown ones
        return np.where(found_D > 0, found_D.astype(np.int64) - 1 + vocabulary.first_id, _NO_ROW)

    return find


def _number_lookup(known_V: Ids, first_id: int) -> Callable[[Sequence[Key] | Ids], Ids]:
    """As `_lookup`, of whole numbers."""
    order_V = np.argsort(known_V, kind="stable")
    sorted_V = known_V[order_V]

    def find(keys: Sequence[Key] | Ids) -> Ids:
        found_D = np.array(keys, np.int64)
        place_D = np.searchsorted(sorted_V, found_D)
        is_known_D = np.zeros(len(found_D), bool)
        inside_D = place_D < len(sorted_V)
        is_known_D[inside_D] = sorted_V[place_D[inside_D]] == found_D[inside_D]
        ids_D = np.full(len(found_D), _NO_ROW, np.int64)
        ids_D[is_known_D] = first_id + order_V[place_D[is_known_D]]
        return ids_D

    return find
