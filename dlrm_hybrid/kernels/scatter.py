"""Sparse vectors into dense ones and back: pushes and pulls at a server, rounding at a trainer.

A server adds what trainers send and marks where, then lists the marks, and takes the sums from
there: all of it costs as much as was sent, save one look at a bit per element. Indices must be in
range: `wire.sparse` has checked those that came over the wire.

Shapes: N elements of a tensor, K of them, W = ceil(N / 64) words of marks; in `give_back` N and K
are those of several tensors, which lie between E places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Marks = npt.NDArray[np.uint64]


@kernel
def scatter_add(indices_K: Int32s, values_K: Float32s, sum_N: Float32s, touched_W: Marks) -> None:
    """Add values to elements of `sum_N`, and set the bit of each in `touched_W`."""
    for k in range(indices_K.size):
        index = indices_K[k]
        sum_N[index] += values_K[k]
        touched_W[index >> 6] |= np.uint64(1) << np.uint64(index & 63)


@kernel
def collect(touched_W: Marks, indices_K: Int32s) -> int:
    """List the elements marked, ascending, and clear the marks; returns how many there are.

    `indices_K` has room for all elements.
    """
    found = 0
    for word in range(touched_W.size):
        mask = touched_W[word]
        touched_W[word] = np.uint64(0)
        while mask != np.uint64(0):
            indices_K[found] = (word << 6) + trailing_zeros(mask)
            found += 1
            mask &= mask - np.uint64(1)
    return found


@kernel
def take(sum_N: Float32s, indices_K: Int32s, out_K: Float32s) -> None:
    """Move elements of `sum_N` out of it; 0 stays in their place."""
    for k in range(indices_K.size):
        out_K[k] = sum_N[indices_K[k]]
        sum_N[indices_K[k]] = np.float32(0)


@kernel
def put(indices_K: Int32s, values_K: Float32s, out_N: Float32s) -> None:
    """Overwrite elements of `out_N`."""
    for k in range(indices_K.size):
        out_N[indices_K[k]] = values_K[k]


@kernel
def give_back(
    firsts_E: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    rounded_K: Float32s,
    residual_N: Float32s,
) -> None:
    """Overwrite elements of residuals with what rounding took, and drop what became zero.

    Args:
        firsts_E: where the residual of each tensor begins in `residual_N`, and the end of the last.
        bounds_E: where the elements of each begin among the K, and the end of the last; receives
            the same of those that are left.
        indices_K: positions in their tensors; move up over what is dropped.
        values_K: before rounding.
        rounded_K: after it; move up too.
        residual_N: of all tensors.
    """
    kept = 0
    first = bounds_E[0]
    for tensor in range(bounds_E.size - 1):
        last = bounds_E[tensor + 1]
        for k in range(first, last):
            rounded = rounded_K[k]
            residual_N[firsts_E[tensor] + indices_K[k]] = values_K[k] - rounded
            indices_K[kept] = indices_K[k]
            rounded_K[kept] = rounded
            kept += rounded != 0
        bounds_E[tensor + 1] = kept
        first = last
