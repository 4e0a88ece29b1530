"""Elements whose magnitude reaches a threshold leave a residual, in one pass over it.

64 elements make one mask of comparisons; only the bits set in it cost more. The comparison lets
NaN and infinity through whatever the threshold, so that looking at what leaves is enough to notice
every value that is not finite.

Shapes: N elements of a tensor, K that leave.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import BLOCK, add_mask64_ge, mask64_ge, trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]

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
