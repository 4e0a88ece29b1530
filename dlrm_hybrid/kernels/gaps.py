"""Increasing indices as Golomb-Rice codes of the gaps between them, and back; ids of a batch.

A gap is how many elements lie between an index and the one before. Its code with parameter r is
gap >> r ones, a zero, and the r low bits of the gap; where that takes 24 ones or more it is 24 ones
and the gap in 32 bits. So no code is longer than 56 bits, and one window of 64 holds it wherever it
starts. Bits fill bytes from the lowest on. (S. W. Golomb, IEEE Trans. Inf. Theory 12, 1966; R. F.
Rice, JPL 79-22, 1979.)

A tensor has one parameter for all its gaps: those of a real gradient's rows do not stay alike from
one dozen to the next, so a parameter that follows them costs more than the best single one. Any
bytes are safe to read.

The ids whose gaps travel are listed here too: each id of a batch once, and a cache of rows.

Shapes: K indices or ids, F tables, L of them looked up, B rows of a batch, N bags, D embedding
dimension, T trainers.
"""

from __future__ import annotations

import numpy as np

from dlrm_hybrid.arrays import Bytes, Float32s, Int32s, Int64s
from dlrm_hybrid.kernels.bits import load64, store64, tail64, trailing_zeros
from dlrm_hybrid.kernels.jit import ReadOnlyBytes, kernel

STORE_BYTES = 8  # encoders write so many at a time
BITS_OF_AN_ID = 34  # at most, on average, in a set of tables with fewer than 2**31 rows
BITS_OF_A_COUNT = 32  # at most

_SAMPLE = 256
_MOST_ONES = 24
_ESCAPE_BITS = _MOST_ONES + 32
_ONES = np.uint64((1 << _MOST_ONES) - 1)
_STOP = np.uint64(1 << _MOST_ONES)
_GAP = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@kernel
def _code_bits(gap: int, parameter: int) -> int:
    ones = gap >> parameter
    return ones + 1 + parameter if ones < _MOST_ONES else _ESCAPE_BITS


@kernel
def _code(gap: int, parameter: int) -> tuple[np.uint64, int]:
    ones = gap >> parameter
    if ones >= _MOST_ONES:
        return _ONES | np.uint64(gap) << np.uint64(_MOST_ONES), _ESCAPE_BITS
    low = np.uint64(gap) & ((_ONE << np.uint64(parameter)) - _ONE)
    return ((_ONE << np.uint64(ones)) - _ONE) | low << np.uint64(ones + 1), ones + 1 + parameter


@kernel
def _append(
    out: Bytes, at: int, filled: int, word: np.uint64, code: np.uint64, length: int
) -> tuple[int, int, np.uint64]:
    """Write up to 56 bits behind the `filled`, fewer than 8, that `word` has at byte `at`."""
    word |= code << np.uint64(filled)
    store64(out, at, word)
    filled += length
    return at + (filled >> 3), filled & 7, word >> np.uint64(filled & ~7)


@kernel
def _window(data: Bytes, at: int) -> np.uint64:
    """At least 57 bits from bit `at` on, the first one lowest; zeros behind the end."""
    byte = at >> 3
    word = load64(data, byte) if byte + 8 <= data.size else tail64(data, byte)
    return word >> np.uint64(at & 7)


@kernel
def _read_code(word: np.uint64, parameter: int) -> tuple[int, int]:
    """The gap whose code is lowest in a window, and the length of the code."""
    ones = trailing_zeros(~word | _STOP)
    if ones < _MOST_ONES:
        low = (word >> np.uint64(ones + 1)) & ((_ONE << np.uint64(parameter)) - _ONE)
        return np.int64(ones << parameter) | np.int64(low), ones + 1 + parameter
    return np.int64((word >> np.uint64(_MOST_ONES)) & _GAP), _ESCAPE_BITS


@kernel
def encode_gaps(indices_K: Int32s, parameter: int, out: Bytes) -> None:
    """Write the codes of increasing indices; `out` has room for them and STORE_BYTES more.

    Bytes behind the codes are zero, up to a multiple of STORE_BYTES or further.
    """
    at, filled, word = np.int64(0), np.int64(0), np.uint64(0)
    previous = np.int64(-1)
    for k in range(indices_K.size):
        code, length = _code(np.int64(indices_K[k]) - previous - 1, parameter)
        previous = np.int64(indices_K[k])
        at, filled, word = _append(out, at, filled, word, code, length)
    store64(out, at, word)


@kernel
def decode_gaps(
    data: ReadOnlyBytes, first: int, parameter: int, count: int, indices_K: Int32s
) -> int:
    """Read K codes that begin at byte `first`.

    Returns:
        the byte behind the codes, or -1 if an index is not below `count`. The byte may lie behind
        the end of `data`.
    """
    at, index = np.int64(first) * 8, np.int64(-1)
    for k in range(indices_K.size):
        gap, length = _read_code(_window(data, at), parameter)
        index += gap + 1
        at += length
        if index >= count:
            return -1
        indices_K[k] = index
    return (at + 7) >> 3


@kernel
def _likely(indices_K: Int32s) -> int:
    """The best parameter for up to `_SAMPLE` gaps, taken at equal distances."""
    size = indices_K.size
    stride = (size + _SAMPLE - 1) // _SAMPLE
    gaps = np.empty((size + stride - 1) // stride, np.int64)
    # No code is shorter with more low bits than the largest gap has.
    gaps[0] = largest = np.int64(indices_K[0])
    for k in range(1, gaps.size):
        gaps[k] = np.int64(indices_K[k * stride]) - np.int64(indices_K[k * stride - 1]) - 1
        largest = max(largest, gaps[k])
    best, fewest, parameter = 0, np.int64(0), 0
    while True:
        bits = np.int64(0)
        for k in range(gaps.size):
            bits += _code_bits(gaps[k], parameter)
        if parameter == 0 or bits < fewest:
            best, fewest = parameter, bits
        if largest >> parameter == 0:
            return best
        parameter += 1


@kernel
def _bits(indices_K: Int32s, parameter: int) -> tuple[int, int, int]:
    """Length of all codes with the parameter below, if there is one, this one and the one above."""
    below = max(parameter - 1, 0)
    bits_below, bits, bits_above = 0, 0, 0
    previous = np.int64(-1)
    for k in range(indices_K.size):
        gap = np.int64(indices_K[k]) - previous - 1
        previous = np.int64(indices_K[k])
        bits_below += _code_bits(gap, below)
        bits += _code_bits(gap, parameter)
        bits_above += _code_bits(gap, parameter + 1)
    return bits_below, bits, bits_above


@kernel
def fit_parameter(indices_K: Int32s) -> tuple[int, int]:
    """A parameter that makes `encode_gaps` short, and the length in bits, of at least one index.

    The best one for a sample, or from there downhill as long as that is shorter: the best of all
    if there are no more than 256 indices. They increase.
    """
    parameter = _likely(indices_K)
    bits_below, bits, bits_above = _bits(indices_K, parameter)
    if indices_K.size <= _SAMPLE:
        return parameter, bits
    while bits_below < bits:
        parameter -= 1
        bits_below, bits, bits_above = _bits(indices_K, parameter)
    while bits_above < bits:
        parameter += 1
        bits_below, bits, bits_above = _bits(indices_K, parameter)
    return parameter, bits


@kernel
def _parameter(count: int, rows: int) -> int:
    """The largest r for which 2**r gaps of that size fit into the table: both ends know it.

    So no id takes more than r + 3 bits on average, whatever the ids are.
    """
    parameter = 0
    while count << (parameter + 1) <= rows:
        parameter += 1
    return parameter


@kernel
def encode_ids(
    ids_K: Int64s, counts_L: Int64s, rows_L: Int64s, count_bits_L: Int64s, out: Bytes
) -> int:
    """Write how many ids of each table follow, then their gaps.

    Args:
        ids_K: table after table; increasing in each, and rows of it.
        counts_L: how many are of each table.
        rows_L: of the tables.
        count_bits_L: of the number that says how many follow; at most 32.
        out: has room for BITS_OF_AN_ID for each id, BITS_OF_A_COUNT for each table, and
            STORE_BYTES.

    Returns:
        bytes written.
    """
    at, filled, word = np.int64(0), np.int64(0), np.uint64(0)
    k = 0
    for table in range(counts_L.size):
        count = counts_L[table]
        at, filled, word = _append(out, at, filled, word, np.uint64(count), count_bits_L[table])
        parameter = _parameter(max(count, 1), rows_L[table])
        following = np.int64(0)
        for _ in range(count):
            code, length = _code(ids_K[k] - following, parameter)
            following = ids_K[k] + 1
            at, filled, word = _append(out, at, filled, word, code, length)
            k += 1
    store64(out, at, word)
    return at + (filled > 0)


@kernel
def decode_ids(
    data: Bytes, rows_L: Int64s, count_bits_L: Int64s, ids_K: Int64s, counts_L: Int64s
) -> int:
    """Read the distinct ids of each table that `encode_ids` wrote.

    Args:
        data: the bytes.
        rows_L: of the tables, fewer than 2**31 each.
        count_bits_L: as the writer had them.
        ids_K: receives the ids; may have room for more.
        counts_L: receives how many are of each table.

    Returns:
        K; -1 if the bytes do not hold such ids, or more than there is room for.
    """
    end, at, k = data.size * 8, np.int64(0), 0
    for table in range(counts_L.size):
        count = np.int64(_window(data, at) & ((_ONE << np.uint64(count_bits_L[table])) - _ONE))
        at += count_bits_L[table]
        counts_L[table] = count
        if at > end or count > rows_L[table] or k + count > ids_K.size:
            return -1
        parameter = _parameter(max(count, 1), rows_L[table])
        following = np.int64(0)
        for _ in range(count):
            gap, length = _read_code(_window(data, at), parameter)
            at += length
            if at > end or gap >= rows_L[table] - following:
                return -1
            ids_K[k] = following + gap
            following += gap + 1
            k += 1
    return k if (at + 7) >> 3 == data.size else -1


@kernel
def unique_ids(
    keys_FB: Int64s,
    shift: int,
    order_F: Int64s,
    ids_K: Int64s,
    counts_F: Int64s,
    inverse_BF: Int64s,
) -> int:
    """List the distinct ids of every table, ascending, and where each id of the batch is listed.

    Args:
        keys_FB: id << shift | row of the batch, ascending in each table.
        shift: 2**shift is more than B.
        order_F: tables in the order in which they are listed.
        ids_K: receives the ids; has room for F * B.
        counts_F: receives how many there are, in the order of `order_F`.
        inverse_BF: receives indices into `ids_K`.

    Returns:
        K.
    """
    num_rows = keys_FB.shape[1]
    mask = (1 << shift) - 1
    listed = 0
    for place in range(order_F.size):
        table = order_F[place]
        first = listed
        for row in range(num_rows):
            key = keys_FB[table, row]
            if row == 0 or key >> shift != ids_K[listed - 1]:
                ids_K[listed] = key >> shift
                listed += 1
            inverse_BF[key & mask, table] = listed - 1
        counts_F[place] = listed - first
    return listed


@kernel
def sum_rows(gradient_BFD: Float32s, inverse_BF: Int64s, sum_KD: Float32s) -> None:
    """Add every gradient to the row of its id, in the order of the batch."""
    for row in range(inverse_BF.shape[0]):
        for table in range(inverse_BF.shape[1]):
            place = inverse_BF[row, table]
            for column in range(sum_KD.shape[1]):
                sum_KD[place, column] += gradient_BFD[row, table, column]


@kernel
def bag_offsets(
    ids_K: Int64s, counts_TL: Int64s, bag_ids_K: Int64s, offsets: Int64s, bags_K: Int64s
) -> None:
    """Order ids by table, then by trainer; every id is a bag, and every table has N bags.

    Args:
        ids_K: by trainer, then by table.
        counts_TL: how many of them each trainer wants of each table.
        bag_ids_K: receives the ids by table.
        offsets: (L * N + 1,), receives where in `bag_ids_K` each bag begins; the last of a table
            are empty.
        bags_K: receives for each of `ids_K` its place in an array (N, L) of bags.
    """
    trainers, tables = counts_TL.shape
    bags = (offsets.size - 1) // max(tables, 1)
    laid = 0
    offsets[0] = 0
    for table in range(tables):
        bag = 0
        source = np.int64(0)
        for earlier in range(table):
            source += counts_TL[0, earlier]
        for trainer in range(trainers):
            for _ in range(counts_TL[trainer, table]):
                bag_ids_K[laid] = ids_K[source]
                bags_K[source] = bag * tables + table
                source += 1
                bag += 1
                laid += 1
                offsets[table * bags + bag] = laid
            if trainer + 1 < trainers:
                for later in range(table + 1, tables):
                    source += counts_TL[trainer, later]
                for earlier in range(table):
                    source += counts_TL[trainer + 1, earlier]
        while bag < bags:
            bag += 1
            offsets[table * bags + bag] = laid


@kernel
def merge_rows(
    rows_N4: Int64s, keys_K: Int64s, batch: int, free_S: Int64s, merged_M4: Int64s, where_K2: Int64s
) -> int:
    """Merge rows of a cache and of a batch, by key: key, batch fetched for, last used by, slot.

    `where_K2` receives the slots of the batch's rows and, of those that are fetched, indices in
    `keys_K`; returns how many those are.
    """
    n, m, fetched = 0, 0, 0
    for k in range(keys_K.size):
        while n < len(rows_N4) and rows_N4[n, 0] <= keys_K[k]:
            for column in range(4):
                merged_M4[m, column] = rows_N4[n, column]
            n, m = n + 1, m + 1
        if m == 0 or merged_M4[m - 1, 0] != keys_K[k]:
            merged_M4[m, 0], merged_M4[m, 1], merged_M4[m, 3] = keys_K[k], batch, free_S[fetched]
            where_K2[fetched, 1] = k
            fetched, m = fetched + 1, m + 1
        merged_M4[m - 1, 2], where_K2[k, 0] = batch, merged_M4[m - 1, 3]
    for i in range(n, len(rows_N4)):  # a slice would take seconds to compile
        for column in range(4):
            merged_M4[m + i - n, column] = rows_N4[i, column]
    return fetched


@kernel
def part_rows(rows_M4: Int64s, batch: int, life: int, capacity: int, left_M4: Int64s) -> int:
    """Move rows that leave a cache to `left_M4`, the others to the front; returns their number."""
    by_age = np.zeros(life + 1, np.int64)
    for m in range(len(rows_M4)):
        by_age[life if batch - rows_M4[m, 1] >= life else batch - rows_M4[m, 2]] += 1
    oldest, first, excess = life, by_age[life], len(rows_M4) - by_age[life] - capacity
    while excess > 0:
        oldest, first = oldest - 1, excess
        excess -= by_age[oldest]
    num_kept = 0
    for m in range(len(rows_M4)):
        age = life if batch - rows_M4[m, 1] >= life else batch - rows_M4[m, 2]
        if age > oldest or (age == oldest and first > 0):
            first -= age == oldest
            for column in range(4):
                left_M4[m - num_kept, column] = rows_M4[m, column]
        else:
            for column in range(4):
                rows_M4[num_kept, column] = rows_M4[m, column]
            num_kept += 1
    return num_kept
