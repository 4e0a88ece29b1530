"""The magnitude of a given rank, by counting: no sort, no loss of exactness.

A float32 without its sign orders like its 31 bits. A histogram over the upper 12 of them finds the
bin that holds the rank, one over the next 12 looks into that bin, one over the last 7 ends the
search, unless so few elements are left that sorting them is faster: a radix select. The bins of the
upper 12 bits alone are 3 to 6 % wide, which may be half of what a Gaussian has beyond 99.9 %; the
two further steps see few elements and cost little.

Counting costs a cycle per element, comparing a sixth of that. So a sample first gives a bound that
lies a little below the magnitude in question, and only what reaches it is counted. A bound that
turns out too high is dropped: the sample decides about time, never about the result.

Shapes: N elements of a tensor, M of them still searched, H = 4096 bins.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import BLOCK, mask64_ge, trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
UInt32s = npt.NDArray[np.uint32]

BINS = 4096
MAGNITUDE = np.uint32(0x7FFFFFFF)
UPPER_SHIFT = np.uint32(19)
MIDDLE_SHIFT = np.uint32(7)
LOWER_SHIFT = np.uint32(0)  # 7 of its 12 bits have more to tell
FEW = 32  # elements; these are sorted
STRIDE = 61  # no divisor of a layer's width: every column of a weight is sampled
SAMPLED_FROM = 8192  # elements; below, all of them are counted


@kernel
def _find(bits_M: UInt32s, shift: np.uint32, rank: int, bins_H: UInt32s) -> tuple[int, int]:
    """The bin of the element of this rank from the top, and its rank inside the bin."""
    for place in range(BINS):
        bins_H[place] = 0
    for bits in bits_M:
        bins_H[(bits >> shift) & np.uint32(BINS - 1)] += np.uint32(1)
    place = BINS - 1
    while bins_H[place] < rank:
        rank -= np.int64(bins_H[place])
        place -= 1
    return place, rank


@kernel
def _narrow(bits_M: UInt32s, shift: np.uint32, place: int) -> int:
    """Move the elements of one bin to the front; how many there are."""
    kept = 0
    for bits in bits_M:
        bits_M[kept] = bits
        kept += (bits >> shift) & np.uint32(BINS - 1) == place
    return kept


@kernel
def _sort(bits_M: UInt32s) -> None:
    """Put the largest first, by insertion."""
    for i in range(1, bits_M.size):
        bits = bits_M[i]
        while i > 0 and bits_M[i - 1] < bits:
            bits_M[i] = bits_M[i - 1]
            i -= 1
        bits_M[i] = bits


@kernel
def _bound(values_N: Float32s, rank: int, scratch_N: UInt32s, bins_H: UInt32s) -> np.uint32:
    """Bits of a magnitude that is probably reached by `rank` elements and not many more."""
    sampled = values_N.size // STRIDE
    expected = rank * sampled / values_N.size
    wanted = int(expected + 4 * math.sqrt(expected) + 4)
    if values_N.size < SAMPLED_FROM or wanted > sampled:
        return np.uint32(0)
    bits_N = values_N.view(np.uint32)
    for i in range(sampled):
        scratch_N[i] = bits_N[i * STRIDE] & MAGNITUDE
    place, _ = _find(scratch_N[:sampled], UPPER_SHIFT, wanted, bins_H)
    return np.uint32(place) << UPPER_SHIFT


@kernel
def _gather(values_N: Float32s, bound: np.float32, scratch_N: UInt32s) -> int:
    """Bits of all magnitudes that are not below a bound; how many there are."""
    bits_N = values_N.view(np.uint32)
    kept = 0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        mask = mask64_ge(values_N, first, bound)
        while mask != np.uint64(0):
            scratch_N[kept] = bits_N[first + trailing_zeros(mask)] & MAGNITUDE
            kept += 1
            mask &= mask - np.uint64(1)
    for position in range(blocks, values_N.size):
        scratch_N[kept] = bits_N[position] & MAGNITUDE
        kept += not abs(values_N[position]) < bound
    return kept


@kernel
def magnitude_of_rank(values_N: Float32s, rank: int) -> float:
    """The magnitude that `rank` elements reach: rank 1 gives the largest, rank N the smallest.

    Values that are not finite count as larger than all others, NaN as larger than infinity.

    Args:
        values_N: contiguous.
        rank: 1 to N.
    """
    scratch_N = np.empty(values_N.size, np.uint32)
    bins_H = np.empty(BINS, np.uint32)
    scratch_N[0] = _bound(values_N, rank, scratch_N, bins_H)
    count = _gather(values_N, scratch_N.view(np.float32)[0], scratch_N)
    if count < rank:
        count = _gather(values_N, np.float32(0), scratch_N)
    for shift in (UPPER_SHIFT, MIDDLE_SHIFT, LOWER_SHIFT):
        if count <= FEW:
            break
        place, rank = _find(scratch_N[:count], shift, rank, bins_H)
        count = _narrow(scratch_N[:count], shift, place)
    # Beyond the last bin all that is left is equal.
    _sort(scratch_N[: min(count, FEW)])
    return scratch_N.view(np.float32)[rank - 1 if count <= FEW else 0]
