"""The largest magnitudes of every row, by bisection: no sort, and exactly the sort's threshold.

A float32 without its sign orders like its 31 bits. The upper 15 of them fit an int16, of which
two vector instructions compare 64: 15 counts find the upper half of the threshold, whatever the
values. Only what shares it (a few of 256 elements, or many equal ones) is searched for the lower
half. What is not finite has the largest bits of all and shows in one more count.

Shapes: B rows of N elements, K kept of all B * N, M of a row that share an upper half.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray

from dlrm_hybrid.kernels.bits import (
    BLOCK,
    floats_at,
    mask64_ge,
    mask64_ge_int16,
    population,
    trailing_zeros,
)
from dlrm_hybrid.kernels.jit import ReadOnlyBytes, kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int16s = npt.NDArray[np.int16]
UInt32s = npt.NDArray[np.uint32]
Bytes = npt.NDArray[np.uint8]

MAGNITUDE = np.uint32(0x7FFFFFFF)
HALF = np.uint32(16)
LOWER = np.uint32(0xFFFF)
NOT_FINITE = 0x7F80  # upper half of infinity, and the least of NaN
# With a threshold of 0 exact zeros must stay: the smallest positive float32 keeps just them.
SMALLEST = np.float32(1e-45)


@kernel
def encode_rows(
    x: int,
    rows: int,
    width: int,
    keep: int,
    indices_K: Int32s,
    values_K: Float32s,
    tau_B: Float32s,
) -> int:
    """Find the elements of every row that reach its `keep`-th largest magnitude and are not 0.

    The threshold of a row is element N - keep, from 0, of its magnitudes in ascending order; all
    that tie with it are kept (Gupta et al., KDD 2021, algorithm 2).

    Args:
        x: address of B * N elements.
        rows: B.
        width: N.
        keep: 1 to N.
        indices_K: receives flat positions in ascending order; has room for B * N.
        values_K: receives their values; has room for B * N.
        tau_B: receives the thresholds.

    Returns:
        how many are kept, or -1 if a value is not finite; the outputs are then of no use.
    """
    x_BN = carray(floats_at(x), (rows, width))
    blocks = width // BLOCK * BLOCK
    upper_N = np.empty((width + BLOCK - 1) // BLOCK * BLOCK, np.int16)
    for i in range(width, upper_N.size):
        upper_N[i] = -1
    lower_M = np.empty(width, np.int32)
    tau_bits_B = tau_B.view(np.uint32)
    kept = 0
    for row in range(rows):
        x_N = x_BN[row]
        bits_N = x_N.view(np.uint32)
        for i in range(width):
            upper_N[i] = np.int16((bits_N[i] & MAGNITUDE) >> HALF)
        if _reaching(upper_N, NOT_FINITE) > 0:
            return -1
        upper = _upper_half(upper_N, keep)
        lower = _lower_half(bits_N, upper_N, upper, keep, lower_M)
        tau_bits_B[row] = (np.uint32(upper) << HALF) | np.uint32(lower)
        limit = max(tau_B[row], SMALLEST)
        start = row * width
        for first in range(0, blocks, BLOCK):
            mask = mask64_ge(x_N, first, limit)
            while mask != np.uint64(0):
                position = first + trailing_zeros(mask)
                indices_K[kept] = start + position
                values_K[kept] = x_N[position]
                kept += 1
                mask &= mask - np.uint64(1)
        for position in range(blocks, width):
            value = x_N[position]
            indices_K[kept] = start + position
            values_K[kept] = value
            kept += abs(value) >= limit
    return kept


@kernel
def decode_rows(indices_K: Int32s, values_K: Float32s, out: int, count: int) -> None:
    """Write values to their places, 0 to all others, of `count` elements at address `out`."""
    out_N = carray(floats_at(out), count)
    for i in range(count):
        out_N[i] = np.float32(0)
    for k in range(indices_K.size):
        out_N[indices_K[k]] = values_K[k]


@kernel
def decode_rows_of_halves(indices_K: Int32s, halves: ReadOnlyBytes, out: int, count: int) -> None:
    """As `decode_rows` of bfloat16, two bytes each."""
    out_N = carray(floats_at(out), count)
    words_N = out_N.view(np.uint32)
    for i in range(count):
        out_N[i] = np.float32(0)
    for k in range(indices_K.size):
        high = np.uint32(halves[2 * k + 1]) << np.uint32(24)
        words_N[indices_K[k]] = high | np.uint32(halves[2 * k]) << HALF


@kernel
def gather(x: int, count: int, indices_K: Int32s, out_K: Float32s) -> None:
    """Read the values at the given places of `count` elements at address `x`."""
    x_N = carray(floats_at(x), count)
    for k in range(indices_K.size):
        out_K[k] = x_N[indices_K[k]]


@kernel
def _reaching(upper_N: Int16s, limit: int) -> int:
    """How many elements are not below `limit`; the size is a multiple of 64."""
    count = 0
    for first in range(0, upper_N.size, BLOCK):
        count += population(mask64_ge_int16(upper_N, first, np.int16(limit)))
    return count


@kernel
def _upper_half(upper_N: Int16s, keep: int) -> int:
    """Largest number that at least `keep` elements reach; none reaches NOT_FINITE."""
    low, high = 0, NOT_FINITE
    while high - low > 1:
        middle = (low + high) >> 1
        enough = _reaching(upper_N, middle) >= keep
        low = middle if enough else low
        high = high if enough else middle
    return low


@kernel
def _lower_half(bits_N: UInt32s, upper_N: Int16s, upper: int, keep: int, lower_M: Int32s) -> int:
    """Lower half of the threshold, of which the upper one is known."""
    above = 0
    shared = 0
    for first in range(0, upper_N.size, BLOCK):
        greater = mask64_ge_int16(upper_N, first, np.int16(upper + 1))
        mask = mask64_ge_int16(upper_N, first, np.int16(upper)) & ~greater
        above += population(greater)
        while mask != np.uint64(0):
            lower_M[shared] = bits_N[first + trailing_zeros(mask)] & LOWER
            shared += 1
            mask &= mask - np.uint64(1)
    wanted = keep - above
    low, high = 0, 1 << 16
    while high - low > 1:
        middle = (low + high) >> 1
        count = 0
        for m in range(shared):
            count += lower_M[m] >= middle
        low = middle if count >= wanted else low
        high = high if count >= wanted else middle
    return low
