"""Levels of kept activations and of their gradients as coded symbols, and back.

    positions                        `kernels.levels.positions`
    of each row that keeps any       step │ flip, if gradients │ levels
    of each level                    symbol │ its low bits, if any │ sign, where one is negative

The symbol of a level has the table of its unit's second class: units whose levels are alike. The
gradient of a row is nearly one vector times a number of any sign, so a row is flipped to where the
rows before were: a bit for the sign of all levels, and the symbols are signed.

Shapes: K kept of B rows of N units; S symbols, C contexts, E = S + 1 offsets; P classes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlrm_hybrid.arrays import Bytes, Halves, Int16s, Int32s, Int64s
from dlrm_hybrid.kernels.bits import address_of
from dlrm_hybrid.kernels.jit import ReadOnlyBytes, kernel
from dlrm_hybrid.kernels.levels.positions import (
    CLASSES,
    SYMBOLS,
    list_positions,
    read_positions,
)
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

SYMBOL_BITS = 5
# Contexts: one for each class of levels, one of steps, one for each class of positions.
STEPS, POSITIONS = CLASSES, CLASSES + 1
CONTEXTS, CONTEXTS_OF_GRADIENTS = POSITIONS + CLASSES, POSITIONS
ESCAPE = 31  # symbol of a step whose code follows in 10 bits
CODE_BITS = 10
# Of an element: gap and its low bits, symbol and low bits of its level, sign.
EVENTS_OF_AN_ELEMENT, EVENTS_OF_A_ROW = 5, 3


class UnitTables(NamedTuple):
    """What coder and reader of a message both have.

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
def encode_kept(
    indices_K: Int32s,
    levels_K: Int16s,
    codes_B: Int16s,
    bits: int,
    signed: bool,
    tables: UnitTables,
    out: Bytes,
) -> int:
    """Code kept activations; gives the bytes written.

    Args:
        indices_K: flat, increasing.
        levels_K: of them, none 0.
        codes_B: of steps.
        bits: of a level's magnitude.
        signed: whether a level may be negative.
        tables: to code with.
        out: has room for 2 bytes for each of 5 events an element, 3 a row, one in REACH places
            and one a class, and STATE_BYTES.
    """
    width, rows = tables.kept_class_N.size, codes_B.size
    low_bits = max(bits - SYMBOL_BITS, 0)
    events_S = np.empty(out.size // 2, np.uint32)
    events, starts = address_of(events_S), address_of(tables.starts_CE)
    positions = row_of(starts, POSITIONS, SYMBOLS)
    at = list_positions(indices_K, rows, tables.kept_class_N, positions, events)
    k = 0
    for row in range(rows):
        first = row * width
        if k < indices_K.size and indices_K[k] < first + width:
            at = _list_step(np.int64(codes_B[row]), tables.lowest_1[0], starts, events, at)
        while k < indices_K.size and indices_K[k] < first + width:
            level = np.int64(levels_K[k])
            size = abs(level)
            context = np.int64(tables.level_class_N[indices_K[k] - first])
            at = list_symbol(size >> low_bits, row_of(starts, context, SYMBOLS), events, at)
            if low_bits:
                at = list_bits(size & ((1 << low_bits) - 1), low_bits, events, at)
            if signed:
                at = list_bits(np.int64(level < 0), 1, events, at)
            k += 1
    return write(events_S, at, out)


@kernel
def decode_kept(
    data: ReadOnlyBytes,
    bits: int,
    signed: bool,
    tables: UnitTables,
    indices_K: Int32s,
    levels_K: Int16s,
    codes_B: Int16s,
) -> int:
    """Read what `encode_kept` wrote; gives K, or -1 if the bytes hold no such elements.

    Args:
        data: the bytes.
        bits: of a level's magnitude.
        signed: whether signs follow.
        tables: to read with.
        indices_K: receives flat indices, increasing; has room for B * N.
        levels_K: receives their levels; has room for B * N.
        codes_B: receives the codes of steps; 0 for a row that keeps nothing.
    """
    width, rows = tables.kept_class_N.size, codes_B.size
    words, state, at = begin(data)
    if at < 0:
        return -1
    starts, hints = address_of(tables.starts_CE), address_of(tables.hints_CH)
    offsets_B = np.zeros(rows + 1, np.int64)
    first, hint = row_of(starts, POSITIONS, SYMBOLS), hint_of(hints, POSITIONS)
    class_N = tables.kept_class_N
    found, state, at = read_positions(words, state, at, class_N, first, hint, offsets_B, indices_K)
    low_bits = max(bits - SYMBOL_BITS, 0)
    for row in range(rows):
        codes_B[row] = 0
        if at < 0:
            return -1
        if offsets_B[row] == offsets_B[row + 1]:
            continue
        code, state, at = _read_step(words, state, at, starts, hints, tables.lowest_1[0])
        if at < 0 or code < LOWEST_CODE or code > HIGHEST_CODE:
            return -1
        codes_B[row] = code
        for k in range(offsets_B[row], offsets_B[row + 1]):
            context = np.int64(tables.level_class_N[indices_K[k] - row * width])
            level_row, hint = row_of(starts, context, SYMBOLS), hint_of(hints, context)
            size, state, at = read_hinted(words, state, at, level_row, hint)
            if low_bits:
                low, state, at = read_bits(words, state, at, low_bits)
                size = size << low_bits | low
            if size == 0 or size >> bits:
                return -1
            is_negative = np.int64(0)
            if signed:
                is_negative, state, at = read_bits(words, state, at, 1)
            levels_K[k] = -size if is_negative else size
    return found if has_ended(state, at) else -1


@kernel
def encode_gradients(
    indices_K: Int32s,
    levels_K: Int16s,
    codes_B: Int16s,
    flips_B: Bytes,
    bits: int,
    tables: UnitTables,
    out: Bytes,
) -> int:
    """Code the gradients of kept activations, turned as `flip` does; gives the bytes written.

    Args:
        indices_K: flat, increasing.
        levels_K: of them.
        codes_B: of steps; 0 where all levels of a row are 0.
        flips_B: rows that were turned.
        bits: of a level's magnitude.
        tables: to code with.
        out: has room for 2 bytes for each of 5 events an element and 3 a row, and STATE_BYTES.
    """
    width = tables.level_class_N.size
    zero = 1 << bits
    low_bits = max(bits + 1 - SYMBOL_BITS, 0)
    events_S = np.empty(out.size // 2, np.uint32)
    events, starts = address_of(events_S), address_of(tables.starts_CE)
    at, k = 0, 0
    for row in range(codes_B.size):
        first, code = row * width, np.int64(codes_B[row])
        has_any = k < indices_K.size and indices_K[k] < first + width
        if has_any:
            at = _list_step(code, tables.lowest_1[0], starts, events, at)
        if has_any and code:
            at = list_bits(np.int64(flips_B[row]), 1, events, at)
        while k < indices_K.size and indices_K[k] < first + width:
            if code:
                value = zero + np.int64(levels_K[k])
                context = np.int64(tables.level_class_N[indices_K[k] - first])
                at = list_symbol(value >> low_bits, row_of(starts, context, SYMBOLS), events, at)
                if low_bits:
                    at = list_bits(value & ((1 << low_bits) - 1), low_bits, events, at)
            k += 1
    return write(events_S, at, out)


@kernel
def decode_gradients(
    data: ReadOnlyBytes,
    indices_K: Int32s,
    bits: int,
    tables: UnitTables,
    levels_K: Int16s,
    codes_B: Int16s,
) -> bool:
    """Read what `encode_gradients` wrote, turned back; False if the bytes hold no such levels.

    Args:
        data: the bytes.
        indices_K: flat, increasing.
        bits: of a level's magnitude.
        tables: to read with.
        levels_K: receives levels.
        codes_B: receives the codes of steps.
    """
    width = tables.level_class_N.size
    zero = 1 << bits
    low_bits = max(bits + 1 - SYMBOL_BITS, 0)
    words, state, at = begin(data)
    if at < 0:
        return False
    starts, hints = address_of(tables.starts_CE), address_of(tables.hints_CH)
    k = 0
    for row in range(codes_B.size):
        first = row * width
        code = np.int64(0)
        turned = np.int64(0)
        if k < indices_K.size and indices_K[k] < first + width:
            code, state, at = _read_step(words, state, at, starts, hints, tables.lowest_1[0])
            if at < 0 or (code and code < LOWEST_CODE) or code > HIGHEST_CODE:
                return False
            if code:
                turned, state, at = read_bits(words, state, at, 1)
        codes_B[row] = code
        while k < indices_K.size and indices_K[k] < first + width:
            level = np.int64(0)
            if code:
                context = np.int64(tables.level_class_N[indices_K[k] - first])
                level_row, hint = row_of(starts, context, SYMBOLS), hint_of(hints, context)
                value, state, at = read_hinted(words, state, at, level_row, hint)
                if low_bits:
                    low, state, at = read_bits(words, state, at, low_bits)
                    value = value << low_bits | low
                level = value - zero
                if abs(level) >= zero:
                    return False
            levels_K[k] = -level if turned else level
            k += 1
    return has_ended(state, at)
