"""Which elements of rows are kept, as coded gaps in sequences of units that are kept as often.

Units are classed by how often they are kept, in octaves of the odds. All rows of all units of a
class are one sequence, units first, in which the gap from one kept element to the next is
geometric: so positions take what each unit's own frequency says, and to code them takes as long as
there are kept ones.

    of each class that has a unit    gap │ … │ END        nothing if there are no rows

A gap is FAR for each REACH, then a symbol and its low bits. Class c has table c.

Shapes: K kept of B rows of N units; P classes.
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from dlrm_hybrid.arrays import Bytes, Int32s, Int64s
from dlrm_hybrid.kernels.bits import highest_bit
from dlrm_hybrid.kernels.levels.rans import (
    hint_of,
    list_bits,
    list_symbol,
    read_bits,
    read_hinted,
    row_of,
)

SYMBOLS = 32
CLASSES = 16
FAR, END = 30, 31  # none among the next REACH; none in the class
REACH = 384
_SINGLE = 8  # gaps with a symbol of their own; above, four symbols to an octave
FIRST_GAPS = np.array([*range(8), *((4 + s % 4) << (s // 4 + 1) for s in range(FAR - 8)), REACH])
"""The least gap of every symbol, and what is above all."""


@register_jitable
def _first_of(symbol: int) -> int:
    """The least gap of a symbol; that of the next is behind its last."""
    if symbol < _SINGLE:
        return symbol
    octave, quarter = (symbol - _SINGLE) >> 2, (symbol - _SINGLE) & 3
    return (4 + quarter) << (octave + 1)


@register_jitable
def _symbol_of(gap: int) -> tuple[int, int, int]:
    """Symbol of a gap below REACH, how many bits follow, and these."""
    if gap < _SINGLE:
        return gap, 0, 0
    octave = highest_bit(np.uint64(gap)) - 3
    bits = octave + 1
    return _SINGLE + 4 * octave + ((gap >> bits) & 3), bits, gap & ((1 << bits) - 1)


@register_jitable
def _ranked(class_N: Bytes, unit_N: Int64s, units_P: Int64s) -> None:
    """Order units by class, then by number, and count those of each class."""
    units_P[:] = 0
    for unit in range(class_N.size):
        units_P[class_N[unit]] += 1
    at_P = np.zeros(units_P.size, np.int64)
    for one in range(1, units_P.size):
        at_P[one] = at_P[one - 1] + units_P[one - 1]
    for unit in range(class_N.size):
        unit_N[at_P[class_N[unit]]] = unit
        at_P[class_N[unit]] += 1


@register_jitable
def list_positions(
    indices_K: Int32s, rows: int, class_N: Bytes, starts: np.uint64, events: np.uint64
) -> int:
    """List which elements are kept; how many events those are."""
    width = class_N.size
    unit_N, units_P = np.empty(width, np.int64), np.empty(CLASSES, np.int64)
    _ranked(class_N, unit_N, units_P)
    # The rows of each unit, by counting.
    begins_N, row_K = np.zeros(width + 1, np.int64), np.empty(indices_K.size, np.int32)
    for k in range(indices_K.size):
        begins_N[np.int64(indices_K[k]) % width + 1] += 1
    for unit in range(width):
        begins_N[unit + 1] += begins_N[unit]
    at_N = begins_N.copy()
    for k in range(indices_K.size):
        row, unit = divmod(np.int64(indices_K[k]), width)
        row_K[at_N[unit]] = row
        at_N[unit] += 1
    at, place = 0, 0
    for one in range(CLASSES):
        table = row_of(starts, one, SYMBOLS)
        following = np.int64(0)
        for number in range(units_P[one]):
            unit = unit_N[place + number]
            for k in range(begins_N[unit], begins_N[unit + 1]):
                gap = number * rows + np.int64(row_K[k]) - following
                following += gap + 1
                while gap >= REACH:
                    at = list_symbol(FAR, table, events, at)
                    gap -= REACH
                symbol, bits, low = _symbol_of(gap)
                at = list_symbol(symbol, table, events, at)
                if bits:
                    at = list_bits(low, bits, events, at)
        if units_P[one] * rows:
            at = list_symbol(END, table, events, at)
        place += units_P[one]
    return at


@register_jitable
def _order_by_row(begins_N: Int64s, ends_N: Int64s, offsets_B: Int64s, indices_K: Int32s) -> None:
    """Make rows by unit to flat indices that increase, and numbers of rows to their sums."""
    rows, width = offsets_B.size - 1, begins_N.size
    for row in range(rows):
        offsets_B[row + 1] += offsets_B[row]
    at_B, row_K = offsets_B.copy(), indices_K.copy()
    for unit in range(width):
        for k in range(begins_N[unit], ends_N[unit]):
            row = np.int64(row_K[k])
            indices_K[at_B[row]] = row * width + unit
            at_B[row] += 1


@register_jitable
def read_positions(
    words: np.uint64,
    state: np.uint64,
    at: int,
    class_N: Bytes,
    starts: np.uint64,
    hints: np.uint64,
    offsets_B: Int64s,
    indices_K: Int32s,
) -> tuple[int, np.uint64, int]:
    """Read which elements are kept, and where those of each row begin; `at` is -1 if none are."""
    width, rows = class_N.size, offsets_B.size - 1
    unit_N, units_P = np.empty(width, np.int64), np.empty(CLASSES, np.int64)
    _ranked(class_N, unit_N, units_P)
    # By unit, in the order of reading: the rows of its elements are one part of `indices_K`.
    begins_N, ends_N = np.zeros(width, np.int64), np.zeros(width, np.int64)
    found, place = 0, 0
    for one in range(CLASSES):
        table = row_of(starts, one, SYMBOLS)
        hint = hint_of(hints, one)
        count, following = units_P[one] * rows, np.int64(0)
        while count:
            symbol, state, at = read_hinted(words, state, at, table, hint)
            if symbol == END:
                break
            if symbol == FAR:
                following += REACH
            else:
                gap = np.int64(_first_of(symbol))
                if symbol >= _SINGLE:
                    low, state, at = read_bits(words, state, at, ((symbol - _SINGLE) >> 2) + 1)
                    gap += low
                following += gap
            if at < 0 or following >= count:
                return 0, state, -1
            if symbol != FAR:
                number = following // rows
                unit, row = unit_N[place + number], following - number * rows
                if ends_N[unit] == 0:
                    begins_N[unit] = found
                indices_K[found] = row
                offsets_B[row + 1] += 1
                found += 1
                ends_N[unit] = found
                following += 1
        place += units_P[one]
    _order_by_row(begins_N, ends_N, offsets_B, indices_K[:found])
    return found, state, at
