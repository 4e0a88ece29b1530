"""Sets of row ids of several tables as one string of bits, and back.

Of every table comes how many ids follow, in as many bits as the largest possible number needs, then
the gaps between the ascending ids in Golomb-Rice code: gap >> r ones, a zero and the r low bits.
Both ends derive r from the rows of the table and the number of ids, the largest for which 2**r
gaps of that size fit into the table; so no id takes more than r + 3 bits on average, whatever the
ids are. Bits fill bytes from the lowest on. (S. W. Golomb, IEEE Trans. Inf. Theory 12, 1966;
R. F. Rice, JPL 79-22, 1979.)

Shapes: K ids, L tables.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import load64, trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

BITS_OF_AN_ID = 34  # at most, on average, of tables with fewer than 2**31 rows
BITS_OF_A_COUNT = 32  # at most

_SEEN = 57  # bits that a window of 8 bytes shows wherever in its first byte it begins
_LAST = np.uint64(1 << (_SEEN - 1))
_ONE = np.uint64(1)


@kernel
def _low_bits(count: int, rows: int) -> int:
    """The parameter r of the code of a table."""
    low = 0
    while count << (low + 1) <= rows:
        low += 1
    return low


@kernel
def _append(out: Bytes, at: int, pool: int, filled: int, code: int) -> tuple[int, int, int]:
    """Write the whole bytes of `pool`, which has `filled` bits; `code` goes on top before."""
    pool |= code
    while filled >= 8:
        out[at] = pool & 0xFF
        pool >>= 8
        filled -= 8
        at += 1
    return at, pool, filled


@kernel
def encode(
    ids_K: Int64s, counts_L: Int64s, rows_L: Int64s, count_bits_L: Int64s, out: Bytes
) -> int:
    """Write the ids, which ascend in each table and are rows of it.

    Args:
        ids_K: table after table.
        counts_L: how many are of each table.
        rows_L: of the tables.
        count_bits_L: of the number that says how many follow; at most 32.
        out: has room for BITS_OF_AN_ID for each id and BITS_OF_A_COUNT for each table.

    Returns:
        bytes written.
    """
    at, pool, filled = 0, 0, 0
    k = 0
    for table in range(counts_L.size):
        count = counts_L[table]
        bits = count_bits_L[table]
        at, pool, filled = _append(out, at, pool, filled + bits, count << filled)
        if count == 0:
            continue
        low = _low_bits(count, rows_L[table])
        following = 0
        for _ in range(count):
            gap = ids_K[k] - following
            following = ids_K[k] + 1
            k += 1
            ones = gap >> low
            while ones >= 32:
                at, pool, filled = _append(out, at, pool, filled + 32, 0xFFFFFFFF << filled)
                ones -= 32
            code = (1 << ones) - 1
            at, pool, filled = _append(out, at, pool, filled + ones + 1, code << filled)
            code = gap & ((1 << low) - 1)
            at, pool, filled = _append(out, at, pool, filled + low, code << filled)
    if filled > 0:
        out[at] = pool
        at += 1
    return at


@kernel
def _window(given: Bytes, at: int) -> np.uint64:
    """At least `_SEEN` bits from bit `at` on, the first one lowest; zeros behind the end."""
    byte = at >> 3
    if byte + 8 <= given.size:
        return load64(given, byte) >> np.uint64(at & 7)
    word = np.uint64(0)
    for place in range(byte, given.size):
        word |= np.uint64(given[place]) << np.uint64(8 * (place - byte))
    return word >> np.uint64(at & 7)


@kernel
def decode(
    given: Bytes, rows_L: Int64s, count_bits_L: Int64s, ids_K: Int64s, counts_L: Int64s
) -> int:
    """Read ids, most of them from one window of 64 bits each.

    Args:
        given: what `encode` wrote.
        rows_L: of the tables, fewer than 2**31 each.
        count_bits_L: as the writer had them.
        ids_K: receives the ids; may have room for more.
        counts_L: receives how many are of each table.

    Returns:
        K; -1 if the bytes do not hold such ids, or more than there is room for.
    """
    end = given.size * 8
    at = np.int64(0)
    k = 0
    for table in range(counts_L.size):
        count = np.int64(_window(given, at) & ((_ONE << np.uint64(count_bits_L[table])) - _ONE))
        at += count_bits_L[table]
        if at > end:
            return -1
        counts_L[table] = count
        if count > rows_L[table] or k + count > ids_K.size:
            return -1
        low = _low_bits(max(count, 1), rows_L[table])
        following = np.int64(0)
        for _ in range(count):
            most = (rows_L[table] - 1 - following) >> low
            word = _window(given, at)
            ones = trailing_zeros(~word | _LAST)
            gap = ones
            # A longer run goes on in the next window, as far as a row of the table allows.
            while ones == _SEEN - 1 and gap <= most:
                at += ones
                word = _window(given, at)
                ones = trailing_zeros(~word | _LAST)
                gap += ones
            at += ones + 1
            if gap > most or at + low > end:
                return -1
            rest = word >> np.uint64(ones + 1)
            if ones + 1 + low > _SEEN:
                rest = _window(given, at)
            gap = gap << low | np.int64(rest & ((_ONE << np.uint64(low)) - _ONE))
            at += low
            if gap >= rows_L[table] - following:
                return -1
            ids_K[k] = following + gap
            following += gap + 1
            k += 1
    return k if (at + 7) >> 3 == given.size else -1
