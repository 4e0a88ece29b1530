"""Categories to rows of tables by the vocabularies of a run; what to do with unknown ones.

Shapes: R rows, F categorical columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, final

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.vocabulary import Table
from dlrm_hybrid.export.vocabularies import Vocabulary

Keys = npt.NDArray[np.uint32]
Unknown = Literal["error", "zero"]


class UnknownCategoryError(Exception):
    """A category has no row; `row` and `column` count from 0, `key` is the category."""

    def __init__(self, row: int, column: int, key: int) -> None:
        super().__init__(row, column, key)
        self.row = row
        self.column = column
        self.key = key


@final
class Encoder:
    """Finds the ids of categories.

    An unknown category gets id 0 where that stands for all of them. Where no row does, it is an
    error, or gets the id after the last one, whose row in the model is to be zero.

    Args:
        vocabularies: of all columns.
        max_ind_range: categories are taken modulo this; 0 takes them as they are.
        unknown: what happens to categories for which no row stands.
    """

    def __init__(
        self, vocabularies: Sequence[Vocabulary], max_ind_range: int, unknown: Unknown
    ) -> None:
        self.columns = tuple(one.column for one in vocabularies)
        self._first_ids = [one.first_id for one in vocabularies]
        self._sizes = [one.table_rows for one in vocabularies]
        self._modulo = max_ind_range
        self._unknown = unknown
        self._tables: list[Table] = []
        for one in vocabularies:
            table = Table()
            table.insert(one.keys_V.copy(), 0)
            self._tables.append(table)
        self.unknown_F = np.zeros(len(vocabularies), np.int64)

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows that the tables of a model need, with those of zeros."""
        if self._unknown == "error":
            return tuple(self._sizes)
        return tuple(
            size + (first_id == 0)
            for size, first_id in zip(self._sizes, self._first_ids, strict=True)
        )

    def ids(self, keys_FR: Keys) -> npt.NDArray[np.int64]:
        """int64 (F, R), contiguous; counts the unknown ones in `unknown_F`.

        Raises:
            UnknownCategoryError: for the first row that has one for which no row stands.
        """
        ids_FR = np.empty(keys_FR.shape, np.int64)
        first: UnknownCategoryError | None = None
        for column, (table, first_id) in enumerate(zip(self._tables, self._first_ids, strict=True)):
            keys_R = np.ascontiguousarray(keys_FR[column])
            if 0 < self._modulo <= 0xFFFFFFFF:
                keys_R = keys_R % np.uint32(self._modulo)
            found_R = keys_R.copy()
            table.lookup(found_R)  # 1 + number, 0 for unknown ones
            ids_R = found_R.astype(np.int64) - 1 + first_id
            unknown = np.flatnonzero(found_R == 0)
            self.unknown_F[column] += len(unknown)
            if first_id == 0 and len(unknown):
                ids_R[unknown] = self._sizes[column]
                row = int(unknown[0])
                if first is None or row < first.row:
                    first = UnknownCategoryError(row, column, int(keys_R[row]))
            ids_FR[column] = ids_R
        if first is not None and self._unknown == "error":
            raise first
        return ids_FR
