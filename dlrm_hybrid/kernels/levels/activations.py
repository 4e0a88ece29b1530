"""Levels of kept activations and of their gradients as coded symbols, and back.

    of each class that has a unit    gap │ … │ END             nothing if there are no rows
    of each row that keeps any       step │ flip, if gradients │ levels
    of each level                    symbol │ its low bits, if any │ sign, where one is negative

Units are classed by how often they are kept, in octaves of the odds. All rows of all units of a
class are one sequence, units first, in which the gap from one kept element to the next is
geometric: so positions take what each unit's own frequency says, and to code them takes as long as
there are kept ones. A gap is FAR for each REACH, then a symbol and its low bits. Class c has table
c.

The symbol of a level has the table of its unit's second class: units whose levels are alike. The
gradient of a row is nearly one vector times a number of any sign, so a row is flipped to where the
rows before were: a bit for the sign of all levels, and the symbols are signed.

Shapes: K kept of B rows of N units; S symbols, C contexts, E = S + 1 offsets; P classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from dlrm_hybrid.arrays import Bytes, Halves, Int16s, Int32s, Int64s
from dlrm_hybrid.kernels.bits import address_of, highest_bit
from dlrm_hybrid.kernels.jit import ReadOnlyBytes, kernel
from dlrm_hybrid.kernels.levels.rans import (
    begin,
    has_ended,
    hint_of,
    list_bits,
    list_symbol,
    read_bits,
    read_hinted,
    row_of,
    write,
)
from dlrm_hybrid.kernels.levels.steps import HIGHEST_CODE, LOWEST_CODE

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
    for group in range(1, units_P.size):
        at_P[group] = at_P[group - 1] + units_P[group - 1]
    for unit in range(class_N.size):
        unit_N[at_P[class_N[unit]]] = unit
        at_P[class_N[unit]] += 1


@register_jitable
def list_positions(
    indices_K: Int32s, rows: int, class_N: Bytes, starts: np.uint64, events: np.uint64
) -> int:
    """List which elements are kept; returns how many events those are."""
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
    for group in range(CLASSES):
        table = row_of(starts, group, SYMBOLS)
        following = np.int64(0)
        for number in range(units_P[group]):
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
        if units_P[group] * rows:
            at = list_symbol(END, table, events, at)
        place += units_P[group]
    return at


@register_jitable
def _order_by_row(begins_N: Int64s, ends_N: Int64s, offsets_B: Int64s, indices_K: Int32s) -> None:
    """Turn rows by unit into flat indices that increase, and numbers of rows into their sums."""
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
    size, place = 0, 0
    for group in range(CLASSES):
        table = row_of(starts, group, SYMBOLS)
        hint = hint_of(hints, group)
        count, following = units_P[group] * rows, np.int64(0)
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
                    begins_N[unit] = size
                indices_K[size] = row
                offsets_B[row + 1] += 1
                size += 1
                ends_N[unit] = size
                following += 1
        place += units_P[group]
    _order_by_row(begins_N, ends_N, offsets_B, indices_K[:size])
    return size, state, at


SYMBOL_BITS = 5
# Contexts: one for each class of levels, one of steps, one for each class of positions.
STEPS, POSITIONS = CLASSES, CLASSES + 1
CONTEXTS, CONTEXTS_OF_GRADIENTS = POSITIONS + CLASSES, POSITIONS
ESCAPE = 31  # symbol of a step whose code follows in 10 bits
CODE_BITS = 10
# Of an element: gap and its low bits, symbol and low bits of its level, sign.
EVENTS_OF_AN_ELEMENT, EVENTS_OF_A_ROW = 5, 3


class UnitLevels(NamedTuple):
    """The kind of a message's levels.

    Attributes:
        bits: of a level's magnitude.
        is_gradient: of activations that the reader knows to be kept.
        is_signed: whether an activation may be negative.
    """

    bits: int
    is_gradient: bool
    is_signed: bool


class UnitTables(NamedTuple):
    """The tables that coder and reader of a message both have.

    Attributes:
        kept_class_N: by how often a unit is kept.
        level_class_N: by its levels.
        starts_CE: intervals of symbols.
        hints_CH: of each context, the first symbol in each 16 of 4096 places.
        lowest_1: code of the first symbol of steps.
    """

    kept_class_N: Bytes
    level_class_N: Bytes
    starts_CE: Halves
    hints_CH: Halves
    lowest_1: Int64s


@kernel
def _list_step(code: int, lowest: int, starts: np.uint64, events: np.uint64, at: int) -> int:
    table = row_of(starts, STEPS, SYMBOLS)
    if 0 <= code - lowest < ESCAPE:
        return list_symbol(code - lowest, table, events, at)
    at = list_symbol(ESCAPE, table, events, at)
    return list_bits(code, CODE_BITS, events, at)


@kernel
def _read_step(
    words: np.uint64,
    state: np.uint64,
    at: int,
    starts: np.uint64,
    hints: np.uint64,
    lowest: int,
) -> tuple[int, np.uint64, int]:
    row, hint = row_of(starts, STEPS, SYMBOLS), hint_of(hints, STEPS)
    symbol, state, at = read_hinted(words, state, at, row, hint)
    if symbol < ESCAPE:
        return lowest + symbol, state, at
    code, state, at = read_bits(words, state, at, CODE_BITS)
    return code, state, at


@kernel
def encode_units(
    indices_K: Int32s,
    levels_K: Int16s,
    codes_B: Int16s,
    flips_B: Bytes,
    kind: UnitLevels,
    tables: UnitTables,
    out: Bytes,
) -> int:
    """Code levels of units; returns the bytes written.

    Args:
        indices_K: flat, increasing.
        levels_K: of them; of activations none is 0, gradients are turned as `flip` does.
        codes_B: of steps; 0 where all levels of a row are 0.
        flips_B: rows that were turned, if gradients.
        kind: of the levels.
        tables: to code with.
        out: has room for 2 bytes for each of 5 events an element, 3 a row and, if activations, one
            in REACH places and one a class, and STATE_BYTES.
    """
    bits, is_gradient, is_signed = kind
    width, rows = tables.level_class_N.size, codes_B.size
    zero = np.int64(is_gradient) << bits
    low_bits = max(bits + is_gradient - SYMBOL_BITS, 0)
    events_S = np.empty(out.size // 2, np.uint32)
    events, starts = address_of(events_S), address_of(tables.starts_CE)
    at, k = 0, 0
    if not is_gradient:
        positions = row_of(starts, POSITIONS, SYMBOLS)
        at = list_positions(indices_K, rows, tables.kept_class_N, positions, events)
    for row in range(rows):
        first, code = row * width, np.int64(codes_B[row])
        has_any = k < indices_K.size and indices_K[k] < first + width
        if has_any:
            at = _list_step(code, tables.lowest_1[0], starts, events, at)
        if has_any and is_gradient and code:
            at = list_bits(np.int64(flips_B[row]), 1, events, at)
        while code == 0 and k < indices_K.size and indices_K[k] < first + width:
            k += 1
        while k < indices_K.size and indices_K[k] < first + width:
            level = np.int64(levels_K[k])
            value = zero + (level if is_gradient else abs(level))
            context = np.int64(tables.level_class_N[indices_K[k] - first])
            at = list_symbol(value >> low_bits, row_of(starts, context, SYMBOLS), events, at)
            if low_bits:
                at = list_bits(value & ((1 << low_bits) - 1), low_bits, events, at)
            if is_signed:
                at = list_bits(np.int64(level < 0), 1, events, at)
            k += 1
    return write(events_S, at, out)


@kernel
def decode_units(
    data: ReadOnlyBytes,
    kind: UnitLevels,
    tables: UnitTables,
    indices_K: Int32s,
    levels_K: Int16s,
    codes_B: Int16s,
) -> int:
    """Read what `encode_units` wrote; returns K, or -1 if the bytes hold no such levels.

    Args:
        data: the bytes.
        kind: as it was written.
        tables: to read with.
        indices_K: flat, increasing, of gradients; else receives them, and has room for B * N.
        levels_K: receives their levels, gradients turned back; has room for as many.
        codes_B: receives the codes of steps; 0 for a row that keeps nothing, or has zeros only.
    """
    bits, is_gradient, is_signed = kind
    width, rows = tables.level_class_N.size, codes_B.size
    zero, value_bits = np.int64(is_gradient) << bits, bits + is_gradient
    low_bits = max(value_bits - SYMBOL_BITS, 0)
    words, state, at = begin(data)
    starts, hints = address_of(tables.starts_CE), address_of(tables.hints_CH)
    size, k = indices_K.size, 0
    if at >= 0 and not is_gradient:
        offsets_B, class_N = np.zeros(rows + 1, np.int64), tables.kept_class_N
        table, hint = row_of(starts, POSITIONS, SYMBOLS), hint_of(hints, POSITIONS)
        size, state, at = read_positions(
            words, state, at, class_N, table, hint, offsets_B, indices_K
        )
    if at < 0:
        return -1
    for row in range(rows):
        first, code, turned = row * width, np.int64(0), np.int64(0)
        if k < size and indices_K[k] < first + width:
            code, state, at = _read_step(words, state, at, starts, hints, tables.lowest_1[0])
            is_none = code == 0 and is_gradient
            if at < 0 or code > HIGHEST_CODE or (code < LOWEST_CODE and not is_none):
                return -1
            if is_gradient and code:
                turned, state, at = read_bits(words, state, at, 1)
        codes_B[row] = code
        while k < size and indices_K[k] < first + width:
            level = np.int64(0)
            if code:
                context = np.int64(tables.level_class_N[indices_K[k] - first])
                table, hint = row_of(starts, context, SYMBOLS), hint_of(hints, context)
                value, state, at = read_hinted(words, state, at, table, hint)
                if low_bits:
                    low, state, at = read_bits(words, state, at, low_bits)
                    value = value << low_bits | low
                if value == 0 or value >> value_bits:
                    return -1
                level = value - zero
                if is_signed:
                    turned, state, at = read_bits(words, state, at, 1)
            levels_K[k] = -level if turned else level
            k += 1
    return size if has_ended(state, at) else -1
