"""The format of rows of levels: for each row a flag, set if all are 0, else its levels.

A row's table gives the chances of its flag and of its magnitudes.

Shapes: K rows of a message, table after table; L tables, each a context C of both kinds; S symbols,
E = S + 1; D levels of a row.
"""

from __future__ import annotations

import numpy as np

from dlrm_hybrid.arrays import Bytes, Halves, Int32s, Int64s, Words
from dlrm_hybrid.kernels.bits import address_of
from dlrm_hybrid.kernels.jit import kernel
from dlrm_hybrid.kernels.levels.rans import (
    ESCAPE,
    SYMBOLS,
    begin,
    has_ended,
    list_flag,
    list_level,
    read_flag,
    read_level,
    row_of,
    write,
)
from dlrm_hybrid.kernels.levels.row_deltas import MOST_LEVELS


@kernel
def count_levels(
    levels_KD: Int32s, counts_L: Int64s, set_C: Int64s, flags_C: Int64s, symbols_CS: Int64s
) -> int:
    """Count what `encode_levels` will write.

    Args:
        levels_KD: of the rows of a message.
        counts_L: how many are of each table.
        set_C: rows of nothing but zeros are added to it.
        flags_C: so are all rows.
        symbols_CS: so are the magnitudes of the other rows.

    Returns:
        rows that are not all zeros.
    """
    sent, k, dim = 0, 0, levels_KD.shape[1]
    for table in range(counts_L.size):
        zeros = 0
        for _ in range(counts_L[table]):
            seen = np.int32(0)
            for column in range(dim):
                seen |= levels_KD[k, column]
            if seen == 0:
                zeros += 1
            else:
                for column in range(dim):
                    symbols_CS[table, min(abs(np.int64(levels_KD[k, column])), ESCAPE)] += 1
            k += 1
        set_C[table] += zeros
        flags_C[table] += counts_L[table]
        sent += counts_L[table] - zeros
    return sent


@kernel
def encode_levels(
    levels_KD: Int32s,
    counts_L: Int64s,
    chance_C: Halves,
    starts_CE: Halves,
    events_S: Words,
    out: Bytes,
) -> int:
    """Write rows of levels.

    Args:
        levels_KD: of the rows of a message.
        counts_L: how many are of each table.
        chance_C: of flags, by table.
        starts_CE: of magnitudes, by table.
        events_S: has room for an event for each row, and EVENTS_OF_A_LEVEL for each level sent.
        out: has room for EVENT_BYTES for each of these, and STATE_BYTES.

    Returns:
        bytes written.
    """
    events, starts = address_of(events_S), address_of(starts_CE)
    k, at, dim = 0, 0, levels_KD.shape[1]
    for table in range(counts_L.size):
        chance, row = np.int64(chance_C[table]), row_of(starts, table, SYMBOLS)
        for _ in range(counts_L[table]):
            seen = np.int32(0)
            for column in range(dim):
                seen |= levels_KD[k, column]
            at = list_flag(seen == 0, chance, events, at)
            if seen != 0:
                for column in range(dim):
                    at = list_level(np.int64(levels_KD[k, column]), row, events, at)
            k += 1
    return write(events_S, at, out)


@kernel
def decode_levels(
    data: Bytes, counts_L: Int64s, chance_C: Halves, starts_CE: Halves, levels_KD: Int32s
) -> bool:
    """Read what `encode_levels` wrote; False if the bytes are no such rows."""
    words, state, at = begin(data)
    starts, dim, k = address_of(starts_CE), levels_KD.shape[1], 0
    for table in range(counts_L.size):
        chance, row = np.int64(chance_C[table]), row_of(starts, table, SYMBOLS)
        for _ in range(counts_L[table]):
            is_zero, state, at = read_flag(words, state, at, chance)
            for column in range(dim):
                level = 0
                if not is_zero:
                    level, state, at = read_level(words, state, at, row)
                if abs(level) > MOST_LEVELS:
                    return False
                levels_KD[k, column] = level
            k += 1
    return has_ended(state, at)
