"""Magnitudes by order, count and sum: no sort anywhere, and no loss of exactness.

A float32 without its sign orders like its 31 bits. So the magnitude of a given rank is found by
radix select: a histogram over the upper 12 bits finds the bin that holds the rank, one over the
next 12 looks into that bin, one over the last 7 ends the search, unless so few elements are left
that sorting them is faster. Counting costs a cycle per element, comparing a sixth of that. So a
sample first gives a bound that lies a little below the magnitude in question, and only what reaches
it is counted. A bound that turns out too high is dropped: the sample decides about time, never
about the result.

For a matrix whose rows fit the first cache the same is done by bisection: the upper 15 bits fit an
int16, of which two vector instructions compare 64, and 15 counts find the upper half of the row's
threshold. Only what shares it (a few of 256 elements, or many equal ones) is searched for the lower
half.

Shapes: N elements, M of them still searched, K selected; B rows; H = 4096 bins.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from dlrm_hybrid.arrays import Float32s, Int16s, Int32s, Words
from dlrm_hybrid.kernels.bits import (
    BLOCK,
    MAGNITUDE,
    SMALLEST,
    mask64_ge,
    mask64_ge_int16,
    population,
    trailing_zeros,
)
from dlrm_hybrid.kernels.jit import kernel, reducing_kernel

STRIDE = 61  # no divisor of a layer's width: every column of a weight is sampled
SAMPLED_FROM = 8192  # elements; below, all of them are counted

_BINS = 4096
_UPPER_SHIFT = np.uint32(19)
_MIDDLE_SHIFT = np.uint32(7)
_LOWER_SHIFT = np.uint32(0)  # 7 of its 12 bits have more to tell
_FEW = 32  # elements; these are sorted
_HALF, _LOWER = np.uint32(16), np.uint32(0xFFFF)
_NOT_FINITE = 0x7F80  # upper half of infinity, and the least of NaN


class RowSelection(NamedTuple):
    """The largest elements of every row.

    Attributes:
        indices_K: int32, flat, increasing.
        values_K: float32, none of them 0.
        tau_B: float32, the thresholds.
    """

    indices_K: Int32s
    values_K: Float32s
    tau_B: Float32s


class Moments(NamedTuple):
    """Sums of some values, in float64.

    Attributes:
        total: sum of the values.
        excess: sum of the magnitudes less a shift.
        squares: sum of the squares of that; not finite if a value is not.
        largest: magnitude; NaN is larger than infinity.
    """

    total: float
    excess: float
    squares: float
    largest: float


@reducing_kernel
def moments(values_N: Float32s, shift: float) -> Moments:
    """Sums of the values, and of their magnitudes less `shift`, in one pass."""
    total = excess = squares = 0.0
    top_1 = np.zeros(1, np.uint32)
    bits_N = values_N.view(np.uint32)
    for i in range(values_N.size):
        value = np.float64(values_N[i])
        over = abs(value) - shift
        total += value
        excess += over
        squares += over * over
        top_1[0] = max(top_1[0], bits_N[i] & MAGNITUDE)
    return Moments(total, excess, squares, np.float64(top_1.view(np.float32)[0]))


@kernel
def compact(values_N: Float32s, tau: float, indices_K: Int32s) -> int:
    """List the elements with |x| >= tau, rounded to float32, but no zeros; returns their number.

    Args:
        values_N: NaN reaches every threshold.
        tau: at least 0.
        indices_K: receives their indices, increasing; has room for N.
    """
    limit = max(np.float32(tau), SMALLEST)
    count = 0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        mask = mask64_ge(values_N, first, limit)
        while mask != np.uint64(0):
            indices_K[count] = first + trailing_zeros(mask)
            count += 1
            mask &= mask - np.uint64(1)
    for index in range(blocks, values_N.size):
        indices_K[count] = index
        count += not abs(values_N[index]) < limit
    return count


def reaching(values_N: Float32s, tau: float) -> Int32s:
    """The indices that `compact` lists, in memory of their own."""
    indices_N = np.empty(values_N.size, np.int32)
    return indices_N[: compact(values_N, tau, indices_N)].copy()


@kernel
def _find(bits_M: Words, shift: np.uint32, rank: int, bins_H: Words) -> tuple[int, int]:
    """The bin of the element of this rank from the top, and its rank inside the bin."""
    bins_H[:] = 0
    for bits in bits_M:
        bins_H[(bits >> shift) & np.uint32(_BINS - 1)] += np.uint32(1)
    bin_ = _BINS - 1
    while bins_H[bin_] < rank:
        rank -= np.int64(bins_H[bin_])
        bin_ -= 1
    return bin_, rank


@kernel
def _keep_bin(bits_M: Words, shift: np.uint32, bin_: int) -> int:
    """Move the elements of one bin to the front; returns how many there are."""
    count = 0
    for bits in bits_M:
        bits_M[count] = bits
        count += (bits >> shift) & np.uint32(_BINS - 1) == bin_
    return count


@kernel
def _sort(bits_M: Words) -> None:
    """Put the largest first, by insertion."""
    for i in range(1, bits_M.size):
        bits = bits_M[i]
        while i > 0 and bits_M[i - 1] < bits:
            bits_M[i] = bits_M[i - 1]
            i -= 1
        bits_M[i] = bits


@kernel
def _bound(values_N: Float32s, rank: int, scratch_N: Words, bins_H: Words) -> np.uint32:
    """Bits of a magnitude that is probably reached by `rank` elements and not many more."""
    sampled = values_N.size // STRIDE
    expected = rank * sampled / values_N.size
    sample_rank = int(expected + 4 * math.sqrt(expected) + 4)
    if values_N.size < SAMPLED_FROM or sample_rank > sampled:
        return np.uint32(0)
    bits_N = values_N.view(np.uint32)
    for i in range(sampled):
        scratch_N[i] = bits_N[i * STRIDE] & MAGNITUDE
    bin_, _ = _find(scratch_N[:sampled], _UPPER_SHIFT, sample_rank, bins_H)
    return np.uint32(bin_) << _UPPER_SHIFT


@kernel
def _gather(values_N: Float32s, bound: np.float32, scratch_N: Words) -> int:
    """List the bits of all magnitudes that are not below a bound; returns how many there are."""
    bits_N = values_N.view(np.uint32)
    count = 0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        mask = mask64_ge(values_N, first, bound)
        while mask != np.uint64(0):
            scratch_N[count] = bits_N[first + trailing_zeros(mask)] & MAGNITUDE
            count += 1
            mask &= mask - np.uint64(1)
    for index in range(blocks, values_N.size):
        scratch_N[count] = bits_N[index] & MAGNITUDE
        count += not abs(values_N[index]) < bound
    return count


@kernel
def kth_magnitude(values_N: Float32s, k: int) -> float:
    """The magnitude that k elements reach: k = 1 gives the largest, k = N the smallest.

    Values that are not finite count as larger than all others, NaN as larger than infinity.

    Args:
        values_N: contiguous.
        k: 1 to N.
    """
    rank = k
    scratch_N = np.empty(values_N.size, np.uint32)
    bins_H = np.empty(_BINS, np.uint32)
    scratch_N[0] = _bound(values_N, rank, scratch_N, bins_H)
    count = _gather(values_N, scratch_N.view(np.float32)[0], scratch_N)
    if count < rank:
        count = _gather(values_N, np.float32(0), scratch_N)
    for shift in (_UPPER_SHIFT, _MIDDLE_SHIFT, _LOWER_SHIFT):
        if count <= _FEW:
            break
        bin_, rank = _find(scratch_N[:count], shift, rank, bins_H)
        count = _keep_bin(scratch_N[:count], shift, bin_)
    # Beyond the last bin all that is left is equal.
    _sort(scratch_N[: min(count, _FEW)])
    return scratch_N.view(np.float32)[rank - 1 if count <= _FEW else 0]


@kernel
def _reaching(upper_N: Int16s, limit: int) -> int:
    """How many elements are not below `limit`; the size is a multiple of 64."""
    count = 0
    for first in range(0, upper_N.size, BLOCK):
        count += population(mask64_ge_int16(upper_N, first, np.int16(limit)))
    return count


@kernel
def _upper_half(upper_N: Int16s, k: int) -> int:
    """Largest number that at least `k` elements reach; none reaches _NOT_FINITE."""
    low, high = 0, _NOT_FINITE
    while high - low > 1:
        middle = (low + high) >> 1
        enough = _reaching(upper_N, middle) >= k
        low = middle if enough else low
        high = high if enough else middle
    return low


@kernel
def _lower_half(bits_N: Words, upper_N: Int16s, upper: int, k: int, lower_M: Int32s) -> int:
    """Lower half of the threshold, of which the upper one is known."""
    above = 0
    shared = 0
    for first in range(0, upper_N.size, BLOCK):
        greater = mask64_ge_int16(upper_N, first, np.int16(upper + 1))
        mask = mask64_ge_int16(upper_N, first, np.int16(upper)) & ~greater
        above += population(greater)
        while mask != np.uint64(0):
            lower_M[shared] = bits_N[first + trailing_zeros(mask)] & _LOWER
            shared += 1
            mask &= mask - np.uint64(1)
    rank = k - above
    low, high = 0, 1 << 16
    while high - low > 1:
        middle = (low + high) >> 1
        count = 0
        for m in range(shared):
            count += lower_M[m] >= middle
        low = middle if count >= rank else low
        high = high if count >= rank else middle
    return low


@kernel
def topk_rows(
    x_BN: Float32s, k: int, indices_K: Int32s, values_K: Float32s, tau_B: Float32s
) -> int:
    """Find the elements of every row that reach its k-th largest magnitude and are not 0.

    The threshold of a row is element N - k, from 0, of its magnitudes in ascending order; all
    that tie with it are kept (Gupta et al., KDD 2021, algorithm 2).

    Args:
        x_BN: contiguous.
        k: 1 to N.
        indices_K: receives flat indices, increasing; has room for B * N.
        values_K: receives their values; has room for B * N.
        tau_B: receives the thresholds.

    Returns:
        how many are kept, or -1 if a value is not finite; the outputs are then of no use.
    """
    rows, width = x_BN.shape
    blocks = width // BLOCK * BLOCK
    upper_N = np.empty((width + BLOCK - 1) // BLOCK * BLOCK, np.int16)
    for i in range(width, upper_N.size):
        upper_N[i] = -1
    lower_M = np.empty(width, np.int32)
    tau_bits_B = tau_B.view(np.uint32)
    count = 0
    for row in range(rows):
        x_N = x_BN[row]
        bits_N = x_N.view(np.uint32)
        for i in range(width):
            upper_N[i] = np.int16((bits_N[i] & MAGNITUDE) >> _HALF)
        if _reaching(upper_N, _NOT_FINITE) > 0:
            return -1
        upper = _upper_half(upper_N, k)
        lower = _lower_half(bits_N, upper_N, upper, k, lower_M)
        tau_bits_B[row] = (np.uint32(upper) << _HALF) | np.uint32(lower)
        limit = max(tau_B[row], SMALLEST)
        start = row * width
        for first in range(0, blocks, BLOCK):
            mask = mask64_ge(x_N, first, limit)
            while mask != np.uint64(0):
                index = first + trailing_zeros(mask)
                indices_K[count] = start + index
                values_K[count] = x_N[index]
                count += 1
                mask &= mask - np.uint64(1)
        for index in range(blocks, width):
            value = x_N[index]
            indices_K[count] = start + index
            values_K[count] = value
            count += abs(value) >= limit
    return count


def largest_of_rows(x_BN: Float32s, k: int) -> RowSelection | None:
    """The elements that `topk_rows` finds; None if a value is not finite."""
    indices_N, values_N = np.empty(x_BN.size, np.int32), np.empty(x_BN.size, np.float32)
    tau_B = np.empty(x_BN.shape[0], np.float32)
    count = topk_rows(x_BN, k, indices_N, values_N, tau_B)
    return None if count < 0 else RowSelection(indices_N[:count].copy(), values_N[:count], tau_B)
