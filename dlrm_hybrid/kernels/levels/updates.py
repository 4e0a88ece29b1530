"""Levels of some elements of several matrices, the elements in order of how often they are sent.

Rows and columns have classes, one for each halving of their frequency, and the elements of a tensor
where two classes meet are a block: all are sent about as often. Blocks come in the order of what
row and column promise together, their *group*, so a few groups hold most of what is sent. What is
coded are the gaps between elements in this order, with the chances of their group, and the levels.

    a gap        symbol 0 … 3: itself │ 2 e + h: e + 1 bits, 1h…, the lower e - 1 follow │ SKIP
    a level      symbol 2 (|m| - 1) + sign for |m| <= 15 │ FAR + sign, then |m| - 15
    a group      gaps, each but the last one followed by the level of an element; the last gap
                 ends where the group does, unless an element does
    a message    of each tensor, quantum less that of the tables │ groups

Shapes: N elements of T tensors, K of them sent, R rows and C columns of all tensors, B blocks, G
groups, W = ceil(N / 64) words of marks, S events; of tables C contexts of S symbols; E is one more
than what an offset is of.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numba.extending import register_jitable

from dlrm_hybrid.arrays import Bytes, Float32s, Halves, Int16s, Int32s, Int64s, UInt64s, Words
from dlrm_hybrid.kernels.bits import address_of, highest_bit, trailing_zeros
from dlrm_hybrid.kernels.jit import kernel
from dlrm_hybrid.kernels.levels import rans

CLASSES = 16  # of rows, and of columns
GROUPS = 16


class Order(NamedTuple):
    """The elements of T matrices, by how often they are sent.

    Attributes:
        row_E: where the rows of each tensor begin among the R, then R.
        col_E: the same of columns.
        rows_R2: class of each row, and its number among those of that class.
        cols_C2: the same of columns.
        blocks_TXY: of each class of rows and of columns; its number in order, or -1.
        starts_E: where each block begins, then N.
        blocks_B4: tensor, columns, first in `by_row_R` and first in `by_col_C`.
        by_row_R: rows of each tensor by class.
        by_col_C: the same of columns.
        ends_G: where each group ends.
    """

    row_E: Int64s
    col_E: Int64s
    rows_R2: Int32s
    cols_C2: Int32s
    blocks_TXY: Int32s
    starts_E: Int64s
    blocks_B4: Int32s
    by_row_R: Int32s
    by_col_C: Int32s
    ends_G: Int64s


@kernel
def count_places(
    row_E: Int64s,
    col_E: Int64s,
    splits_E: Int64s,
    local_K: Int32s,
    row_counts_R: Int64s,
    col_counts_C: Int64s,
    counts_T: Int64s,
) -> None:
    """Count how often rows, columns and tensors were sent."""
    for tensor in range(splits_E.size - 1):
        width = col_E[tensor + 1] - col_E[tensor]
        row, end = row_E[tensor], width
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            while local_K[k] >= end:
                row += 1
                end += width
            row_counts_R[row] += 1
            col_counts_C[col_E[tensor] + local_K[k] - end + width] += 1
        counts_T[tensor] += splits_E[tensor + 1] - splits_E[tensor]


@kernel
def sort_by_order(
    order: Order, splits_E: Int64s, local_K: Int32s, positions_K: Int32s, source_K: Int32s
) -> None:
    """List the elements' positions in order, increasing, and which element each is of.

    Args:
        order: of the elements.
        splits_E: where the elements of each tensor begin among the K, then K.
        local_K: their indices in their tensors, increasing in each.
        positions_K: receives the positions.
        source_K: receives which of the K each is of.
    """
    block_K = np.empty(local_K.size, np.int32)
    place_K = np.empty(local_K.size, np.int32)
    ends_E = np.zeros(order.starts_E.size + 1, np.int32)
    for tensor in range(splits_E.size - 1):
        col_first = order.col_E[tensor]
        width = order.col_E[tensor + 1] - col_first
        row, end = order.row_E[tensor], width
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            while local_K[k] >= end:
                row += 1
                end += width
            col = col_first + local_K[k] - end + width
            block = order.blocks_TXY[tensor, order.rows_R2[row, 0], order.cols_C2[col, 0]]
            block_K[k] = block
            offset = order.rows_R2[row, 1] * order.blocks_B4[block, 1] + order.cols_C2[col, 1]
            place_K[k] = order.starts_E[block] + offset
            ends_E[block + 1] += 1
    for block in range(1, ends_E.size):
        ends_E[block] += ends_E[block - 1]
    # In a block they keep their order, so they increase.
    for k in range(local_K.size):
        at = ends_E[block_K[k]]
        ends_E[block_K[k]] = at + 1
        positions_K[at] = place_K[k]
        source_K[at] = k


SYMBOLS = 32
LEVEL_CONTEXT = GROUPS  # of levels, one for every four groups
QUANTUM_CONTEXT = LEVEL_CONTEXT + GROUPS // 4
CONTEXTS = QUANTUM_CONTEXT + 1
MOST = 2**15 - 1  # of a level
MOST_EVENTS = 10  # of an element, its gap included, unless this is long

_SKIP_BITS = 14
_SKIP = 30  # symbol of a gap that is that much longer
_FAR = 30
_NEAR = 15
_MARK = 1 << 31  # of an event whose interval is not looked up yet
_LOWEST, _HIGHEST = -149, 127  # exponents of quanta
_NONE = 1 << 20


class Codebook(NamedTuple):
    """The tables that messages are read with, and what came with them.

    Attributes:
        order: of the elements.
        exponents_T: of quanta.
        starts_CE: intervals of symbols.
        hints_CH: of each context, the first symbol in each 16 of 4096 places.
    """

    order: Order
    exponents_T: Int64s
    starts_CE: Halves
    hints_CH: Halves


@kernel
def quanta(splits_E: Int64s, values_K: Float32s, exponents_T: Int64s) -> bool:
    """The largest power of two of which all values of a tensor are multiples; 0 where all are 0.

    Returns:
        whether all are at most MOST times as large.
    """
    words_K = values_K.view(np.uint32)
    good = True
    for tensor in range(splits_E.size - 1):
        lowest, largest = np.int64(_NONE), 0.0
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            word = np.int64(words_K[k])
            fraction, exponent = word & 0x7FFFFF, word >> 23 & 0xFF
            if fraction == 0 and exponent == 0:
                continue
            good &= exponent != 0xFF
            if exponent > 0:
                fraction |= 1 << 23
            exponent = max(exponent, 1) - 150
            lowest = min(lowest, exponent + trailing_zeros(np.uint64(fraction)))
            largest = max(largest, abs(float(values_K[k])))
        exponents_T[tensor] = 0 if lowest == _NONE else lowest
        good &= largest * math.ldexp(1.0, -exponents_T[tensor]) <= MOST
    return good


@kernel
def _mark_symbol(context: int, symbol: int, events_S: Words, at: int, symbols_CS: Int64s) -> int:
    symbols_CS[context, symbol] += 1
    events_S[at] = _MARK | context << 8 | symbol
    return at + 1


@kernel
def _mark_gap(gap: int, group: int, events_S: Words, at: int, symbols_CS: Int64s) -> int:
    while gap >> _SKIP_BITS > 0:
        at = _mark_symbol(group, _SKIP, events_S, at, symbols_CS)
        gap -= 1 << _SKIP_BITS
    if gap < 4:
        return _mark_symbol(group, gap, events_S, at, symbols_CS)
    bits = highest_bit(np.uint64(gap)) - 1
    at = _mark_symbol(group, 2 * bits + (gap >> bits), events_S, at, symbols_CS)
    return rans.list_bits(gap & ((1 << bits) - 1), bits, address_of(events_S), at)


@kernel
def _mark_level(level: int, context: int, events_S: Words, at: int, symbols_CS: Int64s) -> int:
    size, sign = abs(level), np.int64(level < 0)
    if size <= _NEAR:
        return _mark_symbol(context, 2 * (size - 1) + sign, events_S, at, symbols_CS)
    at = _mark_symbol(context, _FAR + sign, events_S, at, symbols_CS)
    return rans.list_number(size - _NEAR, address_of(events_S), at)


@kernel
def list_update(
    order: Order,
    splits_E: Int64s,
    local_K: Int32s,
    values_K: Float32s,
    exponents_T: Int64s,
    base_T: Int64s,
    events_S: Words,
    symbols_CS: Int64s,
) -> int:
    """List the events of a message, and count its symbols.

    Args:
        order: of the elements.
        splits_E: where the elements of each tensor begin among the K, then K.
        local_K: their indices in their tensors, increasing in each.
        values_K: none is 0.
        exponents_T: of the quanta.
        base_T: those of the tables.
        events_S: has room for all; chances are not in it yet.
        symbols_CS: by context.

    Returns:
        how many there are.
    """
    positions_K, source_K = np.empty(local_K.size, np.int32), np.empty(local_K.size, np.int32)
    sort_by_order(order, splits_E, local_K, positions_K, source_K)
    at = 0
    scale_T = np.empty(exponents_T.size)
    for tensor in range(exponents_T.size):
        scale_T[tensor] = math.ldexp(1.0, -exponents_T[tensor])
        change = exponents_T[tensor] - base_T[tensor]
        doubled = 2 * abs(change) - np.int64(change < 0)
        if doubled < SYMBOLS - 1:
            at = _mark_symbol(QUANTUM_CONTEXT, doubled, events_S, at, symbols_CS)
        else:
            at = _mark_symbol(QUANTUM_CONTEXT, SYMBOLS - 1, events_S, at, symbols_CS)
            low = exponents_T[tensor] - _LOWEST
            at = rans.list_bits(low, 12, address_of(events_S), at)
    position, block, k = np.int64(0), 0, 0
    for group in range(order.ends_G.size):
        end, context = order.ends_G[group], LEVEL_CONTEXT + group // 4
        while position < end:
            here = np.int64(positions_K[k]) if k < positions_K.size else end
            if here >= end:
                at = _mark_gap(end - position, group, events_S, at, symbols_CS)
                position = end
                break
            at = _mark_gap(here - position, group, events_S, at, symbols_CS)
            while here >= order.starts_E[block + 1]:
                block += 1
            scale = scale_T[order.blocks_B4[block, 0]]
            level = np.int64(values_K[source_K[k]] * scale)
            at = _mark_level(level, context, events_S, at, symbols_CS)
            position = here + 1
            k += 1
    return at


@kernel
def write_update(events_S: Words, size: int, starts_CE: Halves, out: Bytes) -> int:
    """Code the events that `list_update` has listed; gives the bytes written."""
    for place in range(size):
        event = np.int64(events_S[place])
        if event & _MARK:
            context, symbol = event >> 8 & 0xFF, event & 0xFF
            start = np.int64(starts_CE[context, symbol])
            width = np.int64(starts_CE[context, symbol + 1]) - start
            events_S[place] = start << 16 | width
    return rans.write(events_S, size, out)


@register_jitable
def _read_gap(
    words: np.uint64, state: np.uint64, at: int, row: np.uint64, hint: np.uint64, most: int
) -> tuple[int, np.uint64, int]:
    """A gap, which may be longer than `most` if this is no message."""
    gap = 0
    symbol, state, at = rans.read_hinted(words, state, at, row, hint)
    while symbol >= _SKIP and gap <= most:
        gap += 1 << _SKIP_BITS
        symbol, state, at = rans.read_hinted(words, state, at, row, hint)
    if symbol < 4:
        return gap + symbol, state, at
    bits = min(symbol // 2 - 1, rans.SCALE_BITS)
    low, state, at = rans.read_bits(words, state, at, bits)
    return gap + ((2 + (symbol & 1)) << bits | low), state, at


@register_jitable
def _read_level(
    words: np.uint64, state: np.uint64, at: int, row: np.uint64, hint: np.uint64
) -> tuple[int, np.uint64, int]:
    """A level other than 0, at most MOST."""
    symbol, state, at = rans.read_hinted(words, state, at, row, hint)
    size = symbol // 2 + 1
    if symbol >= _FAR:
        size, state, at = rans.read_number(words, state, at)
        size = min(size + _NEAR, MOST)
    return -size if symbol & 1 else size, state, at


@kernel
def _read_quanta(
    words: np.uint64,
    state: np.uint64,
    at: int,
    rows: np.uint64,
    base_T: Int64s,
    exponents_T: Int64s,
) -> tuple[np.uint64, int]:
    """The exponents of all tensors; state and place behind them."""
    row = rans.row_of(rows, QUANTUM_CONTEXT, SYMBOLS)
    for tensor in range(exponents_T.size):
        doubled, state, at = rans.read_symbol(words, state, at, row)
        if doubled == SYMBOLS - 1:
            low, state, at = rans.read_bits(words, state, at, 12)
            exponent = low + _LOWEST
        else:
            change = (doubled + 1) // 2
            exponent = base_T[tensor] + (-change if doubled & 1 else change)
        exponents_T[tensor] = min(max(exponent, _LOWEST), _HIGHEST)
    return state, at


@kernel
def read_update(
    data: Bytes,
    codebook: Codebook,
    offsets_E: Int64s,
    marks_W: UInt64s,
    levels_N: Int16s,
    exponents_T: Int64s,
) -> int:
    """Read a message; sets a mark for each element, and its level.

    Args:
        data: that `write_update` has made.
        codebook: came with its tables.
        offsets_E: of the tensors among the N.
        marks_W: all 0.
        levels_N: of the marked elements.
        exponents_T: receives those of the quanta.

    Returns:
        how many elements there are, or -1 if this is no such message; then marks may be set.
    """
    words, state, at = rans.begin(data)
    order, rows, hints = (
        codebook.order,
        address_of(codebook.starts_CE),
        address_of(codebook.hints_CH),
    )
    state, at = _read_quanta(words, state, at, rows, codebook.exponents_T, exponents_T)
    count, position, block = 0, np.int64(0), 0
    for group in range(order.ends_G.size):
        end = order.ends_G[group]
        gap_row, gap_hint = rans.row_of(rows, group, SYMBOLS), rans.hint_of(hints, group)
        context = LEVEL_CONTEXT + group // 4
        level_row, level_hint = rans.row_of(rows, context, SYMBOLS), rans.hint_of(hints, context)
        while position < end:
            gap, state, at = _read_gap(words, state, at, gap_row, gap_hint, end - position)
            position += gap
            if position > end:
                return -1
            if position == end:
                break
            while position >= order.starts_E[block + 1]:
                block += 1
            level, state, at = _read_level(words, state, at, level_row, level_hint)
            tensor, width, first_row, first_col = order.blocks_B4[block]
            offset = np.int32(position - order.starts_E[block])
            row = order.by_row_R[first_row + offset // width]
            col = order.by_col_C[first_col + offset % width]
            columns = order.col_E[tensor + 1] - order.col_E[tensor]
            flat = offsets_E[tensor] + row * columns + col
            marks_W[flat >> 6] |= np.uint64(1) << np.uint64(flat & 63)
            levels_N[flat] = level
            count += 1
            position += 1
    return count if rans.has_ended(state, at) else -1


@kernel
def collect_update(
    marks_W: UInt64s,
    levels_N: Int16s,
    offsets_E: Int64s,
    exponents_T: Int64s,
    splits_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
) -> None:
    """List the marked elements, increasing in their tensors, and clear the marks.

    Args:
        marks_W: that `read_update` has set.
        levels_N: of the marked elements.
        offsets_E: of the tensors among the N.
        exponents_T: of their quanta.
        splits_E: receives where the elements of each tensor begin among the K, then K.
        indices_K: receives indices in their tensors.
        values_K: receives levels times quanta.
    """
    tensor, k = 0, 0
    splits_E[0] = 0
    quantum = np.float32(math.ldexp(1.0, exponents_T[0])) if exponents_T.size else np.float32(0)
    for word in range(marks_W.size):
        mask = marks_W[word]
        marks_W[word] = np.uint64(0)
        while mask != np.uint64(0):
            flat = (word << 6) + trailing_zeros(mask)
            while flat >= offsets_E[tensor + 1]:
                tensor += 1
                splits_E[tensor] = k
                quantum = np.float32(math.ldexp(1.0, exponents_T[tensor]))
            indices_K[k] = flat - offsets_E[tensor]
            values_K[k] = np.float32(levels_N[flat]) * quantum
            k += 1
            mask &= mask - np.uint64(1)
    for later in range(tensor + 1, splits_E.size):
        splits_E[later] = k
