"""Rows that an evaluation has fetched: no table changes during it, so each travels once.

Shapes: K distinct ids of a batch, L tables, S slots, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from dlrm_hybrid.arrays import Float32s, Int64s
from dlrm_hybrid.compress.embedding.memory import Rows, Slots

MOST_BYTES = 1 << 27  # of all kept rows; memory is taken only as far as it is used
_SLOT_BYTES = 16


@final
class KeptRows:
    """Rows of tables that do not change; where room ends, rows asked for longest ago go."""

    def __init__(self, rows_L: Sequence[int], dim: int) -> None:
        row_bytes = 4 * dim + _SLOT_BYTES
        self._slots = Slots(rows_L, max(1, MOST_BYTES // (len(rows_L) * row_bytes)))
        self._values_SD = np.zeros((len(self._slots.held_S2), dim), np.float32)

    def find(self, rows: Rows) -> Int64s:
        """Slots where rows are kept; below 0 for rows that must be fetched."""
        return self._slots.find(rows)

    def complete(self, rows: Rows, found_K: Int64s, fetched_KD: Float32s) -> Float32s:
        """Keep rows that were fetched as they were not found; returns all rows (K, D)."""
        is_kept_K = found_K >= 0
        rows_KD = np.empty((len(found_K), fetched_KD.shape[1]), np.float32)
        rows_KD[is_kept_K] = self._values_SD[found_K[is_kept_K]]
        rows_KD[~is_kept_K] = fetched_KD
        slots_K = self._slots.take(rows)[0][~is_kept_K]  # kept rows stay where they are
        has_slot_K = slots_K >= 0
        self._values_SD[slots_K[has_slot_K]] = fetched_KD[has_slot_K]
        return rows_KD


def not_found(rows: Rows, found_K: Int64s) -> Rows:
    """The rows that must be fetched."""
    ends_L = np.cumsum(rows.counts_L)
    missing_K = found_K < 0
    counts = np.concatenate([[0], np.cumsum(missing_K)])
    return Rows(rows.ids_K[missing_K], counts[ends_L] - counts[ends_L - rows.counts_L])
