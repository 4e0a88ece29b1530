"""What joins a residual and what leaves it, in one pass over memory.

Shapes: N elements of T tensors, K selected, E = T + 1 offsets.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s, UInt64s
from dlrm_hybrid.kernels.bits import (
    BLOCK,
    SMALLEST,
    add_mask64_ge,
    floats_at,
    mask64_ge,
    nearest_bfloat16,
    trailing_zeros,
)
from dlrm_hybrid.kernels.jit import kernel


@kernel
def _accumulate_select(
    gradient_N: Float32s,
    adds: bool,
    residual_N: Float32s,
    tau: np.float32,
    local_K: Int32s,
    values_K: Float32s,
) -> int:
    """`accumulate_select` of one tensor: how many left, or -1 if a sum is not finite.

    64 elements make one mask of comparisons; only the bits set in it cost more. The comparison lets
    NaN and infinity through whatever the threshold, so that looking at what leaves is enough to
    notice every value that is not finite.
    """
    limit = max(tau, SMALLEST)
    count = 0
    finite = True
    blocks = residual_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        if adds:
            mask = add_mask64_ge(gradient_N, residual_N, first, limit)
        else:
            mask = mask64_ge(residual_N, first, limit)
        while mask != np.uint64(0):
            index = first + trailing_zeros(mask)
            value = residual_N[index]
            finite &= np.isfinite(value)
            local_K[count] = index
            values_K[count] = value
            residual_N[index] = np.float32(0)
            count += 1
            mask &= mask - np.uint64(1)
    for index in range(blocks, residual_N.size):
        value = residual_N[index]
        if adds:
            value += gradient_N[index]
        finite &= np.isfinite(value)
        leaves = abs(value) >= limit
        local_K[count] = index
        values_K[count] = value
        residual_N[index] = np.float32(0) if leaves else value
        count += leaves
    return count if finite else -1


@kernel
def accumulate_select(
    gradients_T: UInt64s,
    taus_T: Float32s,
    offsets_E: Int64s,
    residual_N: Float32s,
    splits_E: Int64s,
    local_K: Int32s,
    values_K: Float32s,
) -> int:
    """residual += gradient; then elements with |x| >= tau, but no zeros, leave the residual.

    Args:
        gradients_T: addresses of float32; 0 where the residual holds a gradient.
        taus_T: at least 0.
        offsets_E: where each tensor begins in `residual_N`, then N.
        residual_N: of all tensors; 0 where an element leaves.
        splits_E: receives where what left each tensor begins among the K, then K.
        local_K: receives its indices in its tensor, increasing; has room for N.
        values_K: receives its values; has room for N.

    Returns:
        the first tensor with a sum that is not finite, or -1. If there is one, residual and
        selection are of no use.
    """
    splits_E[0] = 0
    for tensor in range(taus_T.size):
        first = splits_E[tensor]
        own_N = residual_N[offsets_E[tensor] : offsets_E[tensor + 1]]
        adds = gradients_T[tensor] != 0
        gradient_N = carray(floats_at(gradients_T[tensor]), own_N.size)
        count = _accumulate_select(
            gradient_N, adds, own_N, taus_T[tensor], local_K[first:], values_K[first:]
        )
        if count < 0:
            return tensor
        splits_E[tensor + 1] = first + count
    return -1


@kernel
def return_rounding_error(
    offsets_E: Int64s,
    splits_E: Int64s,
    local_K: Int32s,
    values_K: Float32s,
    rounded_K: Float32s,
    residual_N: Float32s,
    rounds: bool,
) -> None:
    """Overwrite elements of residuals with what rounding took, and drop what became zero.

    Args:
        offsets_E: where each tensor begins in `residual_N`, then N.
        splits_E: where the elements of each begin among the K; receives the same of those left.
        local_K: indices in their tensors; move up over what is dropped.
        values_K: values before rounding.
        rounded_K: values after rounding; move up too.
        residual_N: all tensors, one after the other.
        rounds: to bfloat16, which `rounded_K` receives; else the caller has done it.
    """
    if rounds:
        words_K, rounded_words_K = values_K.view(np.uint32), rounded_K.view(np.uint32)
        for k in range(words_K.size):
            rounded_words_K[k] = nearest_bfloat16(words_K[k])
    count = 0
    first = splits_E[0]
    for tensor in range(splits_E.size - 1):
        last = splits_E[tensor + 1]
        for k in range(first, last):
            rounded = rounded_K[k]
            residual_N[offsets_E[tensor] + local_K[k]] = values_K[k] - rounded
            local_K[count] = local_K[k]
            rounded_K[count] = rounded
            count += rounded != 0
        splits_E[tensor + 1] = count
        first = last
