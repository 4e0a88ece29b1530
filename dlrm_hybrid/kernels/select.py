"""Elements whose magnitude reaches a threshold leave a residual, in one pass over it.

64 elements make one mask of comparisons; only the bits set in it cost more. The comparison lets
NaN and infinity through whatever the threshold, so that looking at what leaves is enough to notice
every value that is not finite.

Shapes: N elements of a tensor, K that leave; in `select_all` N and K are those of all T tensors,
which lie between E = T + 1 places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray

from dlrm_hybrid.kernels.bits import BLOCK, add_mask64_ge, floats_at, mask64_ge, trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

# With a threshold of 0 exact zeros must stay: the smallest positive float32 keeps just them.
SMALLEST = np.float32(1e-45)


@kernel
def accumulate_select(
    gradient_N: Float32s, residual_N: Float32s, tau: float, indices_K: Int32s, values_K: Float32s
) -> int:
    """residual += gradient; then elements with |x| >= tau, but no zeros, leave the residual.

    Args:
        gradient_N: contiguous, like all the others.
        residual_N: 0 where an element leaves.
        tau: at least 0; rounded to float32.
        indices_K: receives positions in ascending order; has room for N.
        values_K: receives their values; has room for N.

    Returns:
        how many left, or -1 if a sum is not finite; the outputs are then of no use.
    """
    limit = max(np.float32(tau), SMALLEST)
    kept = 0
    finite = True
    blocks = residual_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        mask = add_mask64_ge(gradient_N, residual_N, first, limit)
        while mask != np.uint64(0):
            position = first + trailing_zeros(mask)
            value = residual_N[position]
            finite &= np.isfinite(value)
            indices_K[kept] = position
            values_K[kept] = value
            residual_N[position] = np.float32(0)
            kept += 1
            mask &= mask - np.uint64(1)
    for position in range(blocks, residual_N.size):
        value = residual_N[position] + gradient_N[position]
        finite &= np.isfinite(value)
        leaves = abs(value) >= limit
        indices_K[kept] = position
        values_K[kept] = value
        residual_N[position] = np.float32(0) if leaves else value
        kept += leaves
    return kept if finite else -1


@kernel
def select(residual_N: Float32s, tau: float, indices_K: Int32s, values_K: Float32s) -> int:
    """As `accumulate_select` without a gradient."""
    limit = max(np.float32(tau), SMALLEST)
    kept = 0
    finite = True
    blocks = residual_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        mask = mask64_ge(residual_N, first, limit)
        while mask != np.uint64(0):
            position = first + trailing_zeros(mask)
            value = residual_N[position]
            finite &= np.isfinite(value)
            indices_K[kept] = position
            values_K[kept] = value
            residual_N[position] = np.float32(0)
            kept += 1
            mask &= mask - np.uint64(1)
    for position in range(blocks, residual_N.size):
        value = residual_N[position]
        finite &= np.isfinite(value)
        leaves = abs(value) >= limit
        indices_K[kept] = position
        values_K[kept] = value
        residual_N[position] = np.float32(0) if leaves else value
        kept += leaves
    return kept if finite else -1


@kernel
def select_all(
    gradients_T: Addresses,
    taus_T: Float32s,
    firsts_E: Int64s,
    residual_N: Float32s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
) -> int:
    """`accumulate_select` of every tensor in one call: to make arrays of gradients takes longer.

    Args:
        gradients_T: addresses of contiguous float32; 0 where the residual holds the gradient.
        taus_T: thresholds, at least 0.
        firsts_E: where each residual begins in `residual_N`, and the end of the last.
        residual_N: of all tensors.
        bounds_E: receives where what leaves each tensor begins, and the end of the last.
        indices_K: receives positions in their tensors; has room for N.
        values_K: receives their values; has room for N.

    Returns:
        the first tensor with a sum that is not finite, or -1.
    """
    bounds_E[0] = 0
    for tensor in range(taus_T.size):
        own_N = residual_N[firsts_E[tensor] : firsts_E[tensor + 1]]
        left_K, values_left_K = indices_K[bounds_E[tensor] :], values_K[bounds_E[tensor] :]
        if gradients_T[tensor] == 0:
            count = select(own_N, taus_T[tensor], left_K, values_left_K)
        else:
            gradient_N = carray(floats_at(gradients_T[tensor]), own_N.size)
            count = accumulate_select(gradient_N, own_N, taus_T[tensor], left_K, values_left_K)
        if count < 0:
            return tensor
        bounds_E[tensor + 1] = bounds_E[tensor] + count
    return -1
