"""Values to and from places in dense vectors: sums at servers, copies at trainers.

A server adds what trainers send and marks where, then lists the marks with the sums there: all of
it costs as much as was sent, save one look at a bit per element. Indices must be in range:
`wire.sparse` has checked those that came over the wire.

Shapes: N elements of T tensors, E = T + 1 offsets, K elements, W = ceil(N / 64) words of marks, X
trainers.
"""

from __future__ import annotations

import numpy as np
from numba import carray

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s, UInt64s, Words
from dlrm_hybrid.kernels.bits import (
    LARGEST,
    floats_at,
    nearest_bfloat16,
    trailing_zeros,
)
from dlrm_hybrid.kernels.jit import kernel

_BLOCK = 2048  # elements of every trainer's gradient that stay in the first cache


@kernel
def round_bfloat16(words_K: Words, out_K: Words) -> None:
    """Round the float32 whose bits are `words_K`; finite values stay finite, NaN stays NaN."""
    for k in range(words_K.size):
        out_K[k] = nearest_bfloat16(words_K[k])


@kernel
def gather(indices_K: Int32s, values_N: Float32s, out_K: Float32s) -> None:
    """Copy elements of `values_N`; numpy's `take` widens the indices first."""
    for k in range(indices_K.size):
        out_K[k] = values_N[indices_K[k]]


@kernel
def put(indices_K: Int32s, values_K: Float32s, out_N: Float32s) -> None:
    """Overwrite elements of `out_N`."""
    for k in range(indices_K.size):
        out_N[indices_K[k]] = values_K[k]


@kernel
def put_all(
    arrays_T: UInt64s,
    counts_T: Int64s,
    splits_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    adds: bool,
) -> None:
    """Overwrite elements of tensors that lie anywhere, or add to them.

    Args:
        arrays_T: addresses of contiguous float32.
        counts_T: elements of each.
        splits_E: where the elements of each tensor begin among the K, then K.
        indices_K: positions in their tensors.
        values_K: values for these positions.
        adds: whether to add the values; else they overwrite.
    """
    for tensor in range(arrays_T.size):
        array_N = carray(floats_at(arrays_T[tensor]), counts_T[tensor])
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            if adds:
                array_N[indices_K[k]] += values_K[k]
            else:
                array_N[indices_K[k]] = values_K[k]


@kernel
def scatter_add(
    offsets_E: Int64s,
    splits_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    sum_N: Float32s,
    touched_W: UInt64s,
) -> None:
    """Add values to elements of `sum_N`, and set the bit of each in `touched_W`.

    Args:
        offsets_E: where each tensor begins in `sum_N`, then N.
        splits_E: where the elements of each tensor begin among the K, then K.
        indices_K: positions in their tensors.
        values_K: values to add.
        sum_N: sums of all tensors, one after the other.
        touched_W: a bit for each of these.
    """
    for tensor in range(splits_E.size - 1):
        first = offsets_E[tensor]
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            place = first + indices_K[k]
            sum_N[place] += values_K[k]
            touched_W[place >> 6] |= np.uint64(1) << np.uint64(place & 63)


@kernel
def _divide(sum_N: Float32s, trainers: int) -> int:
    """Divide in place; returns how many elements are then not finite."""
    divisor = np.float32(trainers)
    if trainers & (trainers - 1) == 0:  # the same bits in a fraction of the time
        factor = np.float32(1) / divisor
        for place in range(sum_N.size):
            sum_N[place] *= factor
    else:
        for place in range(sum_N.size):
            sum_N[place] = np.divide(sum_N[place], divisor)
    not_finite = 0
    for place in range(sum_N.size):
        not_finite += not abs(sum_N[place]) <= LARGEST
    return not_finite


@kernel
def collect(
    touched_W: UInt64s, sum_N: Float32s, trainers: int, indices_K: Int32s, means_K: Float32s
) -> tuple[int, bool]:
    """List the marked elements and their means, and clear marks and sums.

    Args:
        touched_W: bits that `scatter_add` has set; cleared.
        sum_N: sums of `scatter_add`; zeroed where a bit was set.
        trainers: number of trainers whose values were added.
        indices_K: receives flat indices, increasing; has room for all elements.
        means_K: receives the sums divided by `trainers`; has room for all elements.

    Returns:
        The number of marked elements, and whether all means are finite.
    """
    count = 0
    for word in range(touched_W.size):
        mask = touched_W[word]
        touched_W[word] = np.uint64(0)
        while mask != np.uint64(0):
            index = (word << 6) + trailing_zeros(mask)
            indices_K[count] = index
            means_K[count] = sum_N[index]
            sum_N[index] = np.float32(0)
            count += 1
            mask &= mask - np.uint64(1)
    return count, _divide(means_K[:count], trainers) == 0


@kernel
def publish(indices_K: Int32s, weight_K: Float32s, out_N: Float32s, sent_K: Float32s) -> None:
    """Move elements of `out_N` towards values by their differences in bfloat16.

    Args:
        indices_K: positions in `out_N`.
        weight_K: values to move towards.
        out_N: receives its own values plus the rounded differences.
        sent_K: receives the rounded differences.
    """
    sent_words_K = sent_K.view(np.uint32)
    for k in range(indices_K.size):
        sent_K[k] = weight_K[k] - out_N[indices_K[k]]
    for k in range(indices_K.size):
        sent_words_K[k] = nearest_bfloat16(sent_words_K[k])
    for k in range(indices_K.size):
        out_N[indices_K[k]] += sent_K[k]


@kernel
def _add(gradient_N: Float32s, sum_N: Float32s, is_first: bool) -> None:
    if is_first:
        for place in range(sum_N.size):
            sum_N[place] = gradient_N[place]
    else:
        for place in range(sum_N.size):
            sum_N[place] += gradient_N[place]


@kernel
def mean_of_all(gradients_XT: UInt64s, offsets_E: Int64s, mean_N: Float32s) -> bool:
    """Write ((g0 + g1) + g2 …) / X; returns whether all of it is finite.

    Args:
        gradients_XT: addresses of contiguous float32.
        offsets_E: where each tensor begins in `mean_N`, then N.
        mean_N: receives the means of all tensors, one after the other.
    """
    trainers, tensors = gradients_XT.shape
    not_finite = 0
    for tensor in range(tensors):
        size = offsets_E[tensor + 1] - offsets_E[tensor]
        own_N = mean_N[offsets_E[tensor] : offsets_E[tensor + 1]]
        for first in range(0, size, _BLOCK):
            block_N = own_N[first : first + _BLOCK]
            for trainer in range(trainers):
                gradient_N = carray(floats_at(gradients_XT[trainer, tensor]), size)
                _add(gradient_N[first : first + _BLOCK], block_N, trainer == 0)
            not_finite += _divide(block_N, trainers)
    return not_finite == 0
