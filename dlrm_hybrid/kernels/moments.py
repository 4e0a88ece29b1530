"""Sums, counts and extremes of magnitudes, each in one pass: what thresholds are estimated from.

Sums are float64, of 64 values at a time in a fixed order, so every processor gets the same bits.

Shapes: N values, K of them that reach a magnitude.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import (
    BLOCK,
    log_parts64,
    magnitude_sums64,
    mask64_ge,
    population,
    sums64,
    trailing_zeros,
)
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]

SMALLEST = np.float32(1e-45)
MAGNITUDE = np.uint32(0x7FFFFFFF)
LN_2 = 0.6931471805599453
BLOCKS_PER_LOG = 15  # mantissas of 960 values stay below 2 ** 1024


@kernel
def sums(values_N: Float32s) -> tuple[float, float]:
    """The sum of the values, and of their squares."""
    total = squares = 0.0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        block_total, block_squares = sums64(values_N, first, 0.0)
        total += block_total
        squares += block_squares
    for position in range(blocks, values_N.size):
        value = np.float64(values_N[position])
        total += value
        squares += value * value
    return total, squares


@kernel
def magnitude_sums(values_N: Float32s, shift: float) -> tuple[float, float]:
    """The sum of the magnitudes less `shift`, and of the squares of that."""
    total = squares = 0.0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        block_total, block_squares = magnitude_sums64(values_N, first, shift)
        total += block_total
        squares += block_squares
    for position in range(blocks, values_N.size):
        value = abs(np.float64(values_N[position])) - shift
        total += value
        squares += value * value
    return total, squares


@kernel
def log_sum(values_N: Float32s) -> float:
    """The sum of the logarithms of all magnitudes but zeros.

    Mantissas are multiplied and exponents added, so that a logarithm is taken once for many values.
    """
    logs, exponents, product, waiting = 0.0, 0, 1.0, 0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        block_product, block_exponent = log_parts64(values_N, first)
        product *= block_product
        exponents += block_exponent
        waiting += 1
        if waiting == BLOCKS_PER_LOG:
            logs += math.log(product)
            product, waiting = 1.0, 0
    logs += math.log(product)
    for position in range(blocks, values_N.size):
        value = abs(np.float64(values_N[position]))
        if value > 0:
            logs += math.log(value)
    return logs + LN_2 * exponents


@kernel
def largest_magnitude(values_N: Float32s) -> float:
    """The largest magnitude; NaN is larger than all, no values give 0."""
    top = np.uint32(0)
    for bits in values_N.view(np.uint32):
        top = max(top, bits & MAGNITUDE)
    out = np.empty(1, np.uint32)
    out[0] = top
    return out.view(np.float32)[0]


@kernel
def count_reaching(values_N: Float32s, tau: float) -> int:
    """How many magnitudes are at least `tau`, rounded to float32; zeros are never counted."""
    limit = max(np.float32(tau), SMALLEST)
    count = 0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        count += population(mask64_ge(values_N, first, limit))
    for position in range(blocks, values_N.size):
        count += not abs(values_N[position]) < limit
    return count


@kernel
def gather_reaching(values_N: Float32s, tau: float, out_K: Float32s) -> int:
    """List the magnitudes that `count_reaching` counts, in their order; how many there are.

    `out_K` has room for N; it may be `values_N`.
    """
    limit = max(np.float32(tau), SMALLEST)
    kept = 0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        mask = mask64_ge(values_N, first, limit)
        while mask != np.uint64(0):
            out_K[kept] = abs(values_N[first + trailing_zeros(mask)])
            kept += 1
            mask &= mask - np.uint64(1)
    for position in range(blocks, values_N.size):
        value = abs(values_N[position])
        if not value < limit:
            out_K[kept] = value
            kept += 1
    return kept
