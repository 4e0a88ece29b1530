"""Positions of the elements whose magnitude reaches a threshold; the elements stay where they are.

Shapes: N elements, K that reach it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import BLOCK, mask64_ge, trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]

SMALLEST = np.float32(1e-45)  # what only zeros do not reach


@kernel
def list_largest(values_N: Float32s, tau: float, count: int, indices_K: Int32s) -> int:
    """List `count` elements with |x| >= tau but no zeros, those above it first, then by position.

    Args:
        values_N: contiguous, finite.
        tau: at least 0, a float32; at most `count` elements are above it.
        count: of elements to list, where so many reach the threshold.
        indices_K: receives positions in ascending order; has room for N.

    Returns:
        how many are listed.
    """
    limit = max(np.float32(tau), SMALLEST)
    found = 0
    blocks = values_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        mask = mask64_ge(values_N, first, limit)
        while mask != np.uint64(0):
            indices_K[found] = first + trailing_zeros(mask)
            found += 1
            mask &= mask - np.uint64(1)
    for position in range(blocks, values_N.size):
        indices_K[found] = position
        found += abs(values_N[position]) >= limit
    surplus = found - count
    if surplus <= 0:
        return found
    # Elements that equal the threshold go, the last ones first.
    equal = 0
    for k in range(found):
        equal += abs(values_N[indices_K[k]]) == limit
    stay = equal - surplus
    kept = 0
    for k in range(found):
        position = indices_K[k]
        indices_K[kept] = position
        if abs(values_N[position]) == limit:
            kept += stay > 0
            stay -= 1
        else:
            kept += 1
    return kept
