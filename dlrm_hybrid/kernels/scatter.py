"""Sparse vectors into dense ones and back: pushes and pulls at a server, rounding at a trainer.

A server adds what trainers send and marks where, then lists the marks, and takes the sums from
there: all of it costs as much as was sent, save one look at a bit per element. Indices must be in
range: `wire.sparse` has checked those that came over the wire.

Shapes: T tensors of N elements in all, K of them, W = ceil(N / 64) words of marks; E = T + 1 places
between which tensors, or what was chosen of them, lie.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray

from dlrm_hybrid.kernels.bits import floats_at, trailing_zeros
from dlrm_hybrid.kernels.halves import nearest_bfloat16
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Marks = npt.NDArray[np.uint64]
Addresses = npt.NDArray[np.uint64]


@kernel
def scatter_add(
    firsts_E: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    sum_N: Float32s,
    touched_W: Marks,
) -> None:
    """Add values to elements of `sum_N`, and set the bit of each in `touched_W`.

    Args:
        firsts_E: where each tensor begins in `sum_N`, and the end of the last.
        bounds_E: where the elements of each begin among the K, and the end of the last.
        indices_K: positions in their tensors.
        values_K: to be added.
        sum_N: of all tensors.
        touched_W: likewise.
    """
    for tensor in range(bounds_E.size - 1):
        first = firsts_E[tensor]
        for k in range(bounds_E[tensor], bounds_E[tensor + 1]):
            place = first + indices_K[k]
            sum_N[place] += values_K[k]
            touched_W[place >> 6] |= np.uint64(1) << np.uint64(place & 63)


@kernel
def collect(touched_W: Marks, places_K: Int32s) -> int:
    """List the elements marked, ascending, and clear the marks; returns how many there are.

    `places_K` has room for all elements.
    """
    found = 0
    for word in range(touched_W.size):
        mask = touched_W[word]
        touched_W[word] = np.uint64(0)
        while mask != np.uint64(0):
            places_K[found] = (word << 6) + trailing_zeros(mask)
            found += 1
            mask &= mask - np.uint64(1)
    return found


@kernel
def part(firsts_E: Int64s, places_K: Int32s, bounds_E: Int64s, indices_K: Int32s) -> None:
    """Positions in their tensors of ascending places among the N; the opposite of `scatter_add`.

    Args:
        firsts_E: where each tensor begins, and the end of the last.
        places_K: all below that end.
        bounds_E: receives where those of each tensor begin among the K, and the end of the last.
        indices_K: receives the positions.
    """
    k = 0
    for tensor in range(bounds_E.size - 1):
        bounds_E[tensor] = k
        while k < places_K.size and places_K[k] < firsts_E[tensor + 1]:
            indices_K[k] = places_K[k] - firsts_E[tensor]
            k += 1
    bounds_E[-1] = k


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
def put_all(
    copies_T: Addresses,
    counts_T: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    adds: bool,
) -> None:
    """Overwrite elements of tensors that lie anywhere, or add to them.

    Args:
        copies_T: addresses of contiguous float32.
        counts_T: elements of each.
        bounds_E: where what is said of each begins among the K, and the end of the last.
        indices_K: positions in their tensors.
        values_K: for them.
        adds: whether values are differences.
    """
    for tensor in range(copies_T.size):
        copy_N = carray(floats_at(copies_T[tensor]), counts_T[tensor])
        for k in range(bounds_E[tensor], bounds_E[tensor + 1]):
            if adds:
                copy_N[indices_K[k]] += values_K[k]
            else:
                copy_N[indices_K[k]] = values_K[k]


@kernel
def approach(places_K: Int32s, value_K: Float32s, out_N: Float32s, told_K: Float32s) -> None:
    """Move elements of `out_N` towards values by their differences in bfloat16.

    Args:
        places_K: of the elements.
        value_K: for them.
        out_N: receives the sums.
        told_K: receives the rounded differences.
    """
    told_words_K = told_K.view(np.uint32)
    for k in range(places_K.size):
        told_K[k] = value_K[k] - out_N[places_K[k]]
    for k in range(places_K.size):
        told_words_K[k] = nearest_bfloat16(told_words_K[k])
    for k in range(places_K.size):
        out_N[places_K[k]] += told_K[k]


@kernel
def give_back(
    firsts_E: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    rounded_K: Float32s,
    residual_N: Float32s,
    rounds: bool,
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
        rounds: to bfloat16, which `rounded_K` receives; else the caller has done it.
    """
    if rounds:
        words_K, rounded_words_K = values_K.view(np.uint32), rounded_K.view(np.uint32)
        for k in range(words_K.size):
            rounded_words_K[k] = nearest_bfloat16(words_K[k])
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
