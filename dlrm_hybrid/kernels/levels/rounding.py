"""Values as integer multiples of a power of two, one for each tensor.

The quantum of a tensor is half the smallest power of two that the smallest magnitude to be sent
does not exceed, but at least half the one nearest to the mean magnitude: most elements that a
threshold selects become ±1 to ±4, and a choice that others have made is not written out to its last
bits. So the product of level and quantum and the rest are both exact in float32: nothing is lost.
The whole power costs 0.1 % of log-loss, a quarter no less than the half (docs/results/levels.md).

Shapes: K values of T tensors, E = T + 1 offsets: where those of each tensor begin, then K.
"""

from __future__ import annotations

import math

import numpy as np

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s
from dlrm_hybrid.kernels.jit import kernel

MOST = 255  # levels have 8 bits, as many as a bfloat16
_LOWEST, _HIGHEST = -126, 119  # exponents of quanta whose multiples are normal float32
_MOST_BITS = 20  # of the largest value as a multiple: what is left of it has no more than 24
_SQRT_HALF = 0.7071067811865476


@kernel
def _nearest_power(value: float) -> int:
    """The exponent of the power of two that is nearest to a positive number, by their ratio."""
    fraction, exponent = math.frexp(value)
    return exponent - (fraction < _SQRT_HALF)


@kernel
def _power_above(value: float) -> int:
    """The exponent of the smallest power of two that a positive number does not exceed."""
    fraction, exponent = math.frexp(value)
    return exponent - (fraction == 0.5)


@kernel
def _quantum(values_K: Float32s) -> float:
    """The quantum of one tensor; 0 if all values are 0, NaN if one is not finite."""
    smallest, largest, total = np.inf, 0.0, 0.0
    for k in range(values_K.size):
        size = abs(float(values_K[k]))
        total += size
        largest = max(largest, size)
        if size > 0:
            smallest = min(smallest, size)
    if not np.isfinite(total):
        return np.nan
    if total == 0:
        return 0.0
    of_mean = _nearest_power(total / values_K.size)
    exponent = max(_power_above(smallest), of_mean) - 1
    exponent = max(exponent, _nearest_power(largest) - _MOST_BITS)
    return math.ldexp(1.0, min(max(exponent, _LOWEST), _HIGHEST))


@kernel
def round_to_levels(splits_E: Int64s, values_K: Float32s, rounded_K: Float32s) -> int:
    """Round the values of each tensor to multiples of its quantum, at most MOST of them.

    Args:
        splits_E: where the values of each tensor begin among the K, then K.
        values_K: to be rounded.
        rounded_K: receives the multiples; what they lack of the values is exact in float32.

    Returns:
        the first tensor with a value that is not finite, or -1.
    """
    for tensor in range(splits_E.size - 1):
        first, last = splits_E[tensor], splits_E[tensor + 1]
        quantum = _quantum(values_K[first:last])
        if np.isnan(quantum):
            return tensor
        for k in range(first, last):
            level = np.rint(values_K[k] / quantum) if quantum > 0 else 0.0
            rounded_K[k] = np.float32(min(max(level, -MOST), MOST) * quantum)
    return -1


@kernel
def add_levels(
    offsets_E: Int64s, splits_E: Int64s, local_K: Int32s, rounded_K: Float32s, value_N: Float32s
) -> None:
    """Add multiples to elements of all tensors, and drop those that are 0.

    Args:
        offsets_E: where each tensor begins in `value_N`, then N.
        splits_E: where the elements of each begin among the K; receives the same of those left.
        local_K: indices in their tensors; move up over what is dropped.
        rounded_K: the multiples; move up too.
        value_N: all tensors, one after the other.
    """
    count = 0
    first = splits_E[0]
    for tensor in range(splits_E.size - 1):
        last = splits_E[tensor + 1]
        for k in range(first, last):
            if rounded_K[k] != 0:
                value_N[offsets_E[tensor] + local_K[k]] += rounded_K[k]
                local_K[count], rounded_K[count] = local_K[k], rounded_K[k]
                count += 1
        splits_E[tensor + 1] = count
        first = last
