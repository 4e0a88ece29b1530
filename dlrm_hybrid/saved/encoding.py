"""Encodes rows of any source as inputs of a model, with the vocabularies and scales of a run.

Needs neither torch nor Arrow.

Shapes: B rows, I dense columns, F categorical columns, M ids of a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np

from dlrm_hybrid.arrays import Float32s, Int64s
from dlrm_hybrid.bags import Bags, jagged, weights_of_all
from dlrm_hybrid.config.commands import Unknown
from dlrm_hybrid.data.preprocessing import NO_ROW, Lookup, ModelColumns, Vocabulary
from dlrm_hybrid.data.sources.cells import missing_key
from dlrm_hybrid.data.sources.columns import Coded, Values, standardised


class RefusedValueError(Exception):
    """A value that the model cannot take.

    Attributes:
        row: number of the row, from 0.
        reason: column, and what is wrong.
        is_unknown: whether it is a category without a row in the table.
    """

    def __init__(self, row: int, column: str, reason: str, is_unknown: bool = False) -> None:
        super().__init__(row, column, reason)
        self.row = row
        self.reason = f"column {column!r}: {reason}"
        self.is_unknown = is_unknown


@final
class Encoder:
    """Encodes values as dense inputs and ids of a model.

    An unknown category gets id 0 if that represents all of them in its column. Else it is an error,
    or gets the id after the last one, whose row must be zero in the model.

    Args:
        unknown: what to do with unknown categories of columns without a shared id 0.
        earlier: an encoder whose indices of vocabularies and counts are kept.

    Attributes:
        unknown_F: number of unknown ids so far by column, without empty values of columns with
            `missing: shared`.
    """

    def __init__(
        self, columns: ModelColumns, unknown: Unknown, earlier: Encoder | None = None
    ) -> None:
        self.columns = columns
        self._unknown: Unknown = unknown
        vocabularies, self._firsts = columns.vocabularies, columns.schema.first_columns
        indices: dict[int, Lookup] = {} if earlier is None else earlier._index_of
        self._index_of: dict[int, Lookup] = {}  # by the identity of a vocabulary's keys
        for vocabulary in columns.schema.by_table(vocabularies):
            keys = id(vocabulary.keys)
            self._index_of[keys] = indices.get(keys) or vocabulary.lookup()
        counts_F = np.zeros(len(vocabularies), np.int64)
        self.unknown_F = counts_F if earlier is None else earlier.unknown_F

    def having(self, vocabularies: Sequence[Vocabulary]) -> Encoder:
        """An encoder with these vocabularies, and the counts of this one."""
        return Encoder(replace(self.columns, vocabularies=vocabularies), self._unknown, self)

    @property
    def padded_rows(self) -> tuple[int, ...]:
        """Rows that the tables of a model need, including rows of zeros."""
        return tuple(
            vocabulary.table_rows + (self._unknown == "zero" and not vocabulary.first_id)
            for vocabulary in self.columns.schema.by_table(self.columns.vocabularies)
        )

    def dense(self, values: Values) -> Float32s:
        """Standardise dense values to float32 (B, I); RefusedValueError if one exceeds it."""
        dense_BI = standardised(values.dense_NI, self.columns.scales)
        is_fine_BI = np.isfinite(dense_BI)
        if not is_fine_BI.all():
            place: list[int] = np.argwhere(~is_fine_BI)[0].tolist()
            row, column = place
            x = float(values.dense_NI[row, column])
            reason = f"{x} is outside 32 bits once it is standardised"
            raise RefusedValueError(row, self.columns.schema.inputs[column].name, reason)
        return dense_BI

    def bags(self, values: Values) -> Bags[Int64s]:
        """Look up all ids; RefusedValueError for the first unknown one, if `unknown` is `error`."""
        schema, is_wrapped = self.columns.schema, 0 < self.columns.modulo <= 0xFFFFFFFF
        ids: list[Int64s] = []
        refusal: RefusedValueError | None = None
        for column, coded in enumerate(values.categories):
            keys = coded.keys
            if is_wrapped and schema.categorical[column].has_hashes:
                keys = np.asarray(keys, np.uint32) % np.uint32(self.columns.modulo)
            vocabulary = self.columns.vocabularies[self._firsts[column]]
            ids_M = self._index_of[id(vocabulary.keys)](keys)
            if not isinstance(keys, np.ndarray):  # distinct keys, not those of all ids
                ids_M = ids_M[coded.index_M]
            unknown = self._settle(column, ids_M, coded)
            if unknown is not None and (refusal is None or unknown.row < refusal.row):
                refusal = unknown
            ids.append(ids_M)
        if refusal is not None and self._unknown == "error":
            raise refusal
        lengths = [coded.length_N for coded in values.categories]
        if all(length_B is None for length_B in lengths):
            return Bags(np.stack(ids))
        one_B = np.ones(len(values.row_N), np.int64)
        lengths_FB = np.stack([one_B if length_B is None else length_B for length_B in lengths])
        pairs = zip(ids, values.categories, strict=True)
        weights_N = weights_of_all([Bags(ids_M, weights=coded.weight_M) for ids_M, coded in pairs])
        lengths_FB = lengths_FB.astype(np.int64)
        return jagged(np.concatenate(ids), lengths_FB, schema.averaged, weights_N)

    def _settle(self, column: int, ids_M: Int64s, coded: Coded) -> RefusedValueError | None:
        """Give unknown categories an id, in place; returns the first one without a row."""
        vocabulary, schema = (
            self.columns.vocabularies[column],
            self.columns.schema.categorical[column],
        )
        unknown = np.flatnonzero(ids_M == NO_ROW)
        if not len(unknown):
            return None
        keys_U: list[Any] = [coded.keys[index] for index in coded.index_M[unknown].tolist()]
        empty = missing_key(schema)
        # Empty values that share id 0 by the schema are not unknown.
        num_shared = keys_U.count(empty) if schema.missing == "shared" else 0
        self.unknown_F[column] += len(unknown) - num_shared
        ids_M[unknown] = 0 if vocabulary.first_id else vocabulary.table_rows
        if vocabulary.first_id:
            return None
        at, key = int(unknown[0]), keys_U[0]
        row = at
        if coded.length_N is not None:
            row = int(np.searchsorted(np.cumsum(coded.length_N), at, "right"))
        shown = f"category {key:08x}" if schema.has_hashes else f"category {key!r:.60}"
        value = "a missing value" if key == empty else shown
        reason = f"{value} was not seen in training"
        return RefusedValueError(row, schema.name, reason, is_unknown=True)
