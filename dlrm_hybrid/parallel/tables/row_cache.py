"""Bookkeeping of a row cache: which rows a trainer keeps, and which it fetches; no values.

A row fetched for batch b is used until batch b + batches. It leaves after that batch, or earlier:
beyond `rows` rows the least recently used leave, ties in order of keys. So what is fetched depends
on the ids of the batches and on nothing else.

Shapes: K distinct ids of a batch, M of them fetched, L rows that leave, N kept: key, batch fetched
for, batch last used by, slot; S slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.gaps import merge_rows, part_rows
from dlrm_hybrid.model.embeddings import DistinctIds
from dlrm_hybrid.model.table_rows import OwnedIds

Int64s = NDArray[np.int64]

_TABLE_SHIFT = 32  # tables have fewer than 2**31 rows
_ID_MASK = (1 << _TABLE_SHIFT) - 1


class CacheLimits(NamedTuple):
    """Capacity of a cache, and how long it may keep a row.

    Attributes:
        rows: most rows kept.
        batches: number that a row serves after the one it was fetched for; at least 1.
    """

    rows: int
    batches: int


@final
@dataclass(frozen=True, slots=True, eq=False)
class CacheTurn:
    """The changes that one batch makes to a cache.

    Attributes:
        before_N4: rows kept before.
        slots_K: slots of the batch's rows.
        fetched_M: indices of those that must be fetched.
        left_L4: rows that leave after the batch, by key.
        slots: S; those of rows that leave are free from the next batch on.
    """

    before_N4: Int64s
    slots_K: Int64s
    fetched_M: Int64s
    left_L4: Int64s
    slots: int


@final
class RowCache:
    """The rows that one trainer caches: keys, ages and slots.

    Attributes:
        kept_N4: rows kept after the last turn, by key; never written to.
    """

    def __init__(self, limits: CacheLimits) -> None:
        self._limits = limits
        self.restart(np.empty((0, 4), np.int64))

    def turn(self, batch: int, keys_K: Int64s) -> CacheTurn:
        """Enter the rows of the next batch; returns what changes.

        Args:
            batch: its number.
            keys_K: increasing.
        """
        if missing := max(len(keys_K) - len(self._free_S), 0):
            more = max(missing, self._slots)
            self._free_S = np.append(self._free_S, np.arange(self._slots, self._slots + more))
            self._slots += more
        before_N4 = self.kept_N4
        rows_M4 = np.empty((len(before_N4) + len(keys_K), 4), np.int64)
        where_K2 = np.empty((len(keys_K), 2), np.int64)
        fetched = merge_rows(before_N4, keys_K, batch, self._free_S, rows_M4, where_K2)
        slots_K, fetched_M = where_K2[:, 0].copy(), where_K2[:fetched, 1].copy()
        rows_M4 = rows_M4[: len(before_N4) + fetched]
        left_M4 = np.empty_like(rows_M4)
        kept = part_rows(rows_M4, batch, self._limits.batches, self._limits.rows, left_M4)
        left_L4 = left_M4[: len(rows_M4) - kept].copy()
        self.kept_N4 = rows_M4[:kept]
        self._free_S = np.concatenate([self._free_S[fetched:], left_L4[:, 3]])
        return CacheTurn(before_N4, slots_K, fetched_M, left_L4, self._slots)

    def restart(self, kept_N4: Int64s) -> None:
        """Start anew with these rows."""
        self.kept_N4 = kept_N4
        self._slots = 1 + int(kept_N4[:, 3].max(initial=-1))
        self._free_S = np.setdiff1d(np.arange(self._slots), kept_N4[:, 3])


def keys_of(ids: DistinctIds) -> Int64s:
    """Keys of a batch's rows: one increasing number per row, from table and id."""
    return ids.ids_K + np.repeat(np.arange(len(ids.counts_F)) << _TABLE_SHIFT, ids.counts_F)


def first_no_row(keys_N: Int64s, rows_F: Int64s) -> int | None:
    """Index of the first number that is no key of such tables or does not increase, or None."""
    tables_N = keys_N >> _TABLE_SHIFT
    is_table_N = (tables_N >= 0) & (tables_N < len(rows_F))
    is_row_N = (keys_N & _ID_MASK) < rows_F[np.where(is_table_N, tables_N, 0)]
    increases_N = np.append(True, keys_N[1:] > keys_N[:-1])[: len(keys_N)]
    wrong = np.flatnonzero(~(is_table_N & is_row_N & increases_N))
    return int(wrong[0]) if len(wrong) else None


def ids_of(keys_K: Int64s, tables: int) -> OwnedIds:
    """The ids of some increasing keys."""
    counts_F = np.bincount(keys_K >> _TABLE_SHIFT, minlength=tables)
    return OwnedIds(keys_K & _ID_MASK, counts_F)
