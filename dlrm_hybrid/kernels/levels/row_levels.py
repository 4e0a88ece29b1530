"""Rows of tables and their gradients as integer levels, what both ends remember of them, and bytes.

A level is a whole number of steps, and a step is a power of two, so what a level stands for and
what rounding leaves are exact. Rows travel as the difference from the copy that the receiver holds;
what rounding leaves of a gradient stays in a residual.

Memory is limited: a table has sets of WAYS slots, row i belongs to set i mod sets, and of a full
set the row leaves that was asked for the longest ago. Which rows have slots follows from the ids of
the messages alone, so both ends know it. The copy of a row without a slot is 0.

Of each row a flag is coded, set if all its levels are 0, else its levels; the row's table gives the
chances of the flag and of magnitudes.

Shapes: K rows of a message, table after table; L tables: first slot, sets; each a context C of
flags and magnitudes; S slots of all: 1 + row or 0 for none, last message that asked for it; of
magnitudes S symbols, E = S + 1; D width of the widest table (rows of others end in zeros).
"""

from __future__ import annotations

import numpy as np

from dlrm_hybrid.arrays import Bytes, Float32s, Float64s, Halves, Int32s, Int64s, Words
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

WAYS = 8
NO_SLOT = -1
MOST_LEVELS = 1 << 30  # a level further from 0 is refused: nothing finite that learns is so large


@kernel
def find_slots(
    ids_K: Int64s, counts_L: Int64s, tables_L2: Int64s, slots_S2: Int64s, slots_K: Int64s
) -> None:
    """Find the slots of rows, NO_SLOT for those that have none; see `take_slots`."""
    k = 0
    for table in range(counts_L.size):
        for _ in range(counts_L[table]):
            start = tables_L2[table, 0] + ids_K[k] % tables_L2[table, 1] * WAYS
            slots_K[k] = NO_SLOT
            for slot in range(start, start + WAYS):
                if slots_S2[slot, 0] == ids_K[k] + 1:
                    slots_K[k] = slot
            k += 1


@kernel
def take_slots(
    ids_K: Int64s,
    counts_L: Int64s,
    tables_L2: Int64s,
    now: int,
    slots_S2: Int64s,
    slots_K: Int64s,
    fresh_K: Int64s,
) -> int:
    """Give slots to the rows of a message.

    Rows of the same message do not push each other out: of more than WAYS rows of a set, the last
    ones get none.

    Args:
        ids_K: distinct rows of each table, table after table.
        counts_L: how many are of each table.
        tables_L2: where the slots of each table are.
        now: number of the message; greater than that of all before.
        slots_S2: who has them.
        slots_K: receives the slots, NO_SLOT for none.
        fresh_K: receives the slots that change their row.

    Returns:
        how many slots change their row.
    """
    fresh, k = 0, 0
    for table in range(counts_L.size):
        first, sets = tables_L2[table]
        end = k + counts_L[table]
        missing = end
        for place in range(end - 1, k - 1, -1):
            start = first + ids_K[place] % sets * WAYS
            slots_K[place] = NO_SLOT
            for slot in range(start, start + WAYS):
                if slots_S2[slot, 0] == ids_K[place] + 1:
                    slots_K[place] = slot
                    slots_S2[slot, 1] = now
            if slots_K[place] == NO_SLOT:
                missing = place
        for place in range(missing, end):
            if slots_K[place] >= 0:
                continue
            start = first + ids_K[place] % sets * WAYS
            oldest = start
            for slot in range(start + 1, start + WAYS):
                if slots_S2[slot, 1] < slots_S2[oldest, 1]:
                    oldest = slot
            if slots_S2[oldest, 1] < now:
                slots_S2[oldest, 0] = ids_K[place] + 1
                slots_S2[oldest, 1] = now
                slots_K[place] = oldest
                fresh_K[fresh] = oldest
                fresh += 1
        k = end
    return fresh


@kernel
def clear_slots(fresh_K: Int64s, values_SD: Float32s) -> int:
    """Set what slots hold to 0; returns how many held something else."""
    lost = 0
    for k in range(fresh_K.size):
        largest = np.float32(0)
        for column in range(values_SD.shape[1]):
            largest = max(largest, abs(values_SD[fresh_K[k], column]))
            values_SD[fresh_K[k], column] = 0
        lost += largest != 0
    return lost


@kernel
def row_levels(
    rows_KD: Float32s,
    step: float,
    slots_K: Int64s,
    copies_SD: Float32s,
    levels_KD: Int32s,
    view_KD: Float32s,
) -> int:
    """Round the differences of rows from their copies to whole steps, and move the copies by them.

    Args:
        rows_KD: the true rows.
        step: a power of two.
        slots_K: of the rows.
        copies_SD: by slot.
        levels_KD: receives the levels.
        view_KD: receives the new copies.

    Returns:
        the first row with a level beyond MOST_LEVELS, or that is none; -1 if there is no such row.
    """
    size, limit = np.float32(step), np.float32(MOST_LEVELS)
    inverse = np.float32(1 / step)  # exact, as the step is a power of two
    dim = rows_KD.shape[1]
    for k in range(rows_KD.shape[0]):
        slot = slots_K[k]
        bad = 0
        if slot >= 0:  # the loops have no branches: they become vector instructions
            for column in range(dim):
                copy = copies_SD[slot, column]
                level = np.rint((rows_KD[k, column] - copy) * inverse)
                bad += not abs(level) <= limit
                levels_KD[k, column] = np.int32(level)
                view_KD[k, column] = copy + np.float32(size * level)
        else:
            for column in range(dim):
                level = np.rint(rows_KD[k, column] * inverse)
                bad += not abs(level) <= limit
                levels_KD[k, column] = np.int32(level)
                view_KD[k, column] = size * level
        if bad:
            return k
        if slot >= 0:
            for column in range(dim):
                copies_SD[slot, column] = view_KD[k, column]
    return -1


@kernel
def rows_of_levels(
    levels_KD: Int32s, step: float, slots_K: Int64s, copies_SD: Float32s, view_KD: Float32s
) -> None:
    """Move copies by levels that `row_levels` has given; the same arithmetic, the same bits."""
    size, dim = np.float32(step), levels_KD.shape[1]
    for k in range(levels_KD.shape[0]):
        slot = slots_K[k]
        if slot < 0:
            for column in range(dim):
                view_KD[k, column] = size * np.float32(levels_KD[k, column])
            continue
        for column in range(dim):
            moved = np.float32(size * np.float32(levels_KD[k, column]))
            view_KD[k, column] = copies_SD[slot, column] + moved
        for column in range(dim):
            copies_SD[slot, column] = view_KD[k, column]


@kernel
def add_squares(values_KD: Float32s, counts_L: Int64s, squares_L: Float64s) -> None:
    """Add the squares of all elements to the sums of their tables, one after the other."""
    k = 0
    for table in range(counts_L.size):
        square = squares_L[table]
        for _ in range(counts_L[table]):
            for column in range(values_KD.shape[1]):
                square += np.float64(values_KD[k, column]) * np.float64(values_KD[k, column])
            k += 1
        squares_L[table] = square


@kernel
def gradient_levels(
    sum_KD: Float32s,
    step: float,
    slots_K: Int64s,
    residuals_SD: Float32s,
    levels_KD: Int32s,
    lost_1: Int64s,
) -> int:
    """Round gradients plus residuals to whole steps; residuals become what rounding leaves.

    Args:
        sum_KD: the gradients.
        step: a power of two.
        slots_K: of the rows; what rounding leaves of a row without one is lost.
        residuals_SD: by slot.
        levels_KD: receives the levels.
        lost_1: one more for each row of which something is lost.

    Returns:
        as `row_levels`.
    """
    size, limit = np.float32(step), np.float32(MOST_LEVELS)
    inverse = np.float32(1 / step)  # exact, as the step is a power of two
    dim = sum_KD.shape[1]
    rest_D = np.empty(dim, np.float32)
    for k in range(sum_KD.shape[0]):
        slot = slots_K[k]
        bad = 0
        for column in range(dim):
            rest_D[column] = sum_KD[k, column]
        if slot >= 0:
            for column in range(dim):
                rest_D[column] += residuals_SD[slot, column]
        for column in range(dim):
            level = np.rint(rest_D[column] * inverse)
            bad += not abs(level) <= limit
            levels_KD[k, column] = np.int32(level)
            rest_D[column] -= np.float32(size * level)
        if bad:
            return k
        if slot >= 0:
            for column in range(dim):
                residuals_SD[slot, column] = rest_D[column]
        else:
            lost_1[0] += np.any(rest_D != 0)
    return -1


@kernel
def scale_levels(levels_KD: Int32s, step: float, values_KD: Float32s) -> None:
    """Write the values that levels stand for: level times step."""
    size = np.float32(step)
    for k in range(levels_KD.shape[0]):
        for column in range(levels_KD.shape[1]):
            values_KD[k, column] = size * np.float32(levels_KD[k, column])


@kernel
def count_levels(
    levels_KD: Int32s,
    counts_L: Int64s,
    dims_L: Int64s,
    set_C: Int64s,
    flags_C: Int64s,
    symbols_CS: Int64s,
) -> int:
    """Count what `encode_levels` will write.

    Args:
        levels_KD: of the rows of a message.
        counts_L: how many are of each table.
        dims_L: width of each table.
        set_C: rows of nothing but zeros are added to it.
        flags_C: so are all rows.
        symbols_CS: so are the magnitudes of the other rows.

    Returns:
        rows that are not all zeros.
    """
    rows, k = 0, 0
    for table in range(counts_L.size):
        zeros, dim = 0, dims_L[table]
        for _ in range(counts_L[table]):
            bits = np.int32(0)
            for column in range(dim):
                bits |= levels_KD[k, column]
            if bits == 0:
                zeros += 1
            else:
                for column in range(dim):
                    symbols_CS[table, min(abs(np.int64(levels_KD[k, column])), ESCAPE)] += 1
            k += 1
        set_C[table] += zeros
        flags_C[table] += counts_L[table]
        rows += counts_L[table] - zeros
    return rows


@kernel
def encode_levels(
    levels_KD: Int32s,
    counts_L: Int64s,
    dims_L: Int64s,
    chance_C: Halves,
    starts_CE: Halves,
    events_S: Words,
    out: Bytes,
) -> int:
    """Write the levels of the rows of a message as code.

    Args:
        levels_KD: of the rows of a message.
        counts_L: how many are of each table.
        dims_L: width of each table.
        chance_C: of flags, by table.
        starts_CE: of magnitudes, by table.
        events_S: has room for an event for each row, and EVENTS_OF_A_LEVEL for each level sent.
        out: has room for EVENT_BYTES for each of these, and STATE_BYTES.

    Returns:
        bytes written.
    """
    events, starts = address_of(events_S), address_of(starts_CE)
    k, at = 0, 0
    for table in range(counts_L.size):
        chance, row = np.int64(chance_C[table]), row_of(starts, table, SYMBOLS)
        dim = dims_L[table]
        for _ in range(counts_L[table]):
            bits = np.int32(0)
            for column in range(dim):
                bits |= levels_KD[k, column]
            at = list_flag(bits == 0, chance, events, at)
            if bits != 0:
                for column in range(dim):
                    at = list_level(np.int64(levels_KD[k, column]), row, events, at)
            k += 1
    return write(events_S, at, out)


@kernel
def decode_levels(
    data: Bytes,
    counts_L: Int64s,
    dims_L: Int64s,
    chance_C: Halves,
    starts_CE: Halves,
    levels_KD: Int32s,
) -> bool:
    """Read what `encode_levels` wrote; False if the bytes are no such rows."""
    words, state, at = begin(data)
    starts, k = address_of(starts_CE), 0
    for table in range(counts_L.size):
        chance, row = np.int64(chance_C[table]), row_of(starts, table, SYMBOLS)
        dim = dims_L[table]
        for _ in range(counts_L[table]):
            is_zero, state, at = read_flag(words, state, at, chance)
            for column in range(dim):
                level = 0
                if not is_zero:
                    level, state, at = read_level(words, state, at, row)
                if abs(level) > MOST_LEVELS:
                    return False
                levels_KD[k, column] = level
            for column in range(dim, levels_KD.shape[1]):
                levels_KD[k, column] = 0
            k += 1
    return has_ended(state, at)
