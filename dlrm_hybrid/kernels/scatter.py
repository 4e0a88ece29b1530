"""Values to and from places in dense vectors: rows of tables, sums at servers, copies at trainers.

A server adds what trainers send and marks where, then lists the marks with the sums there: all of
it costs as much as was sent, save one look at a bit per element. Indices must be in range:
`wire.sparse` has checked those that came over the wire.

All embedding tables lie in one array, and every bag is one id. FBGEMM does the same for any bags
and optimizers and gives the same bits, but takes half a millisecond for a call.

Shapes: N elements of T tensors, E = T + 1 offsets, K elements, W = ceil(N / 64) words of marks, X
trainers; F tables, R rows of all, B rows of a batch, D embedding dimension, Q = D / 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray

from dlrm_hybrid.kernels.bits import (
    LARGEST,
    floats_at,
    fused_multiply_add,
    nearest_bfloat16,
    trailing_zeros,
)
from dlrm_hybrid.kernels.compiler.jit import kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Marks = npt.NDArray[np.uint64]
Addresses = npt.NDArray[np.uint64]
Words = npt.NDArray[np.uint32]
Quads = npt.NDArray[np.complex128]  # four float32 that move together

_BLOCK = 2048  # elements of every trainer's gradient that stay in the first cache
_TILE = 64  # rows of a batch that are written for all tables while they are in the first cache


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
def split(offsets_E: Int64s, indices_K: Int32s, splits_E: Int64s, local_K: Int32s) -> None:
    """Sort increasing flat indices by tensor.

    Args:
        offsets_E: of the tensors.
        indices_K: among the elements of all.
        splits_E: receives where those of each tensor begin among the K, then K.
        local_K: receives the indices in their tensors.
    """
    k = 0
    splits_E[0] = 0
    for tensor in range(offsets_E.size - 1):
        first, end = offsets_E[tensor], offsets_E[tensor + 1]
        while k < indices_K.size and indices_K[k] < end:
            local_K[k] = indices_K[k] - first
            k += 1
        splits_E[tensor + 1] = k


@kernel
def put(indices_K: Int32s, values_K: Float32s, out_N: Float32s) -> None:
    """Overwrite elements of `out_N`."""
    for k in range(indices_K.size):
        out_N[indices_K[k]] = values_K[k]


@kernel
def put_all(
    arrays_T: Addresses,
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
        splits_E: where the elements of each begin among the K, then K.
        indices_K: in their tensors.
        values_K: for them.
        adds: adds them.
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
    touched_W: Marks,
) -> None:
    """Add values to elements of `sum_N`, and set the bit of each in `touched_W`.

    Args:
        offsets_E: of the tensors in `sum_N`.
        splits_E: where the elements of each begin among the K, then K.
        indices_K: in their tensors.
        values_K: to be added.
        sum_N: of all tensors.
        touched_W: likewise.
    """
    for tensor in range(splits_E.size - 1):
        first = offsets_E[tensor]
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            place = first + indices_K[k]
            sum_N[place] += values_K[k]
            touched_W[place >> 6] |= np.uint64(1) << np.uint64(place & 63)


@kernel
def _divide(sum_N: Float32s, trainers: int) -> int:
    """Divide in place; how many elements are then not finite."""
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
    touched_W: Marks, sum_N: Float32s, trainers: int, indices_K: Int32s, means_K: Float32s
) -> tuple[int, bool]:
    """List the marked elements and their means, and clear both.

    Args:
        touched_W: as `scatter_add` has set them.
        sum_N: likewise.
        trainers: whose values were added.
        indices_K: receives flat indices, increasing; has room for all elements.
        means_K: receives the sums divided by `trainers`; has room for all elements.

    Returns:
        how many there are, and whether all means are finite.
    """
    found = 0
    for word in range(touched_W.size):
        mask = touched_W[word]
        touched_W[word] = np.uint64(0)
        while mask != np.uint64(0):
            index = (word << 6) + trailing_zeros(mask)
            indices_K[found] = index
            means_K[found] = sum_N[index]
            sum_N[index] = np.float32(0)
            found += 1
            mask &= mask - np.uint64(1)
    return found, _divide(means_K[:found], trainers) == 0


@kernel
def publish(indices_K: Int32s, weight_K: Float32s, out_N: Float32s, sent_K: Float32s) -> None:
    """Move elements of `out_N` towards values by their differences in bfloat16.

    Args:
        indices_K: of the elements.
        weight_K: for them.
        out_N: receives the sums.
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
def mean_of_all(gradients_XT: Addresses, offsets_E: Int64s, mean_N: Float32s) -> bool:
    """mean = ((g0 + g1) + g2 …) / X; whether all of it is finite.

    Args:
        gradients_XT: addresses of contiguous float32.
        offsets_E: of the tensors in `mean_N`.
        mean_N: of all tensors.
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


@kernel
def look_up(
    weights_N: Quads, starts_F: Int64s, rows_F: Int64s, ids_FB: Int64s, out_BFQ: Quads
) -> int:
    """Copy the row of every id.

    Args:
        weights_N: all tables; here N counts quads.
        starts_F: first element of each table, in float32.
        rows_F: of each table.
        ids_FB: the ids.
        out_BFQ: receives the rows.

    Returns:
        -1; or, if an id is not a row of its table, its place in `ids_FB`.
    """
    tables, rows = ids_FB.shape
    quads = out_BFQ.shape[2]
    for tile in range(0, rows, _TILE):
        for table in range(tables):
            start = starts_F[table] // 4
            for row in range(tile, min(tile + _TILE, rows)):
                chosen = ids_FB[table, row]
                if chosen < 0 or chosen >= rows_F[table]:
                    return table * rows + row
                first = start + chosen * quads
                for quad in range(quads):
                    out_BFQ[row, table, quad] = weights_N[first + quad]
    return -1


@kernel
def apply_sgd(
    weights_N: Float32s,
    starts_F: Int64s,
    keys_FB: Int64s,
    shift: int,
    gradient_BFD: Float32s,
    rate: float,
) -> None:
    """Take from every row its learning rate times the sum of its gradients, summed in batch order.

    Args:
        weights_N: all tables, changed in place.
        starts_F: first element of each table.
        keys_FB: id << shift | row of the batch, ascending in each table.
        shift: 2**shift is more than B.
        gradient_BFD: of the rows that were looked up.
        rate: learning rate.
    """
    tables, rows = keys_FB.shape
    dim = gradient_BFD.shape[2]
    mask = (1 << shift) - 1
    falling = np.float32(-rate)
    sum_D = np.empty(dim, np.float32)
    for table in range(tables):
        place = 0
        while place < rows:
            key = keys_FB[table, place]
            chosen = key >> shift
            for column in range(dim):
                sum_D[column] = gradient_BFD[key & mask, table, column]
            place += 1
            while place < rows and keys_FB[table, place] >> shift == chosen:
                row = keys_FB[table, place] & mask
                for column in range(dim):
                    sum_D[column] += gradient_BFD[row, table, column]
                place += 1
            first = starts_F[table] + chosen * dim
            for column in range(dim):
                weights_N[first + column] = fused_multiply_add(
                    falling, sum_D[column], weights_N[first + column]
                )


@kernel
def _summed(
    rows_K: Int64s, order_K: Int64s, gradient_KD: Float32s, first: int, sum_D: Float32s
) -> int:
    """Sum the gradients of one row, in their order; where in `order_K` those of the next begin."""
    row = rows_K[order_K[first]]
    for column in range(sum_D.size):
        sum_D[column] = gradient_KD[order_K[first], column]
    end = first + 1
    while end < order_K.size and rows_K[order_K[end]] == row:
        for column in range(sum_D.size):
            sum_D[column] += gradient_KD[order_K[end], column]
        end += 1
    return end


@kernel
def update_sgd(
    weights_RD: Float32s, rows_K: Int64s, order_K: Int64s, gradient_KD: Float32s, lr: float
) -> None:
    """Take from rows their learning rate times the sum of their gradients.

    Args:
        weights_RD: rows of all tables, changed in place.
        rows_K: the row of each gradient.
        order_K: sorts `rows_K`; gradients of a row are summed in it.
        gradient_KD: of the rows.
        lr: learning rate.
    """
    sum_D = np.empty(weights_RD.shape[1], np.float32)
    falling, k = np.float32(-lr), 0
    while k < order_K.size:
        row = rows_K[order_K[k]]
        k = _summed(rows_K, order_K, gradient_KD, k, sum_D)
        for column in range(sum_D.size):
            weights_RD[row, column] = fused_multiply_add(
                falling, sum_D[column], weights_RD[row, column]
            )


@kernel
def update_adagrad(
    weights_RD: Float32s,
    squares_RC: Float32s,
    rows_K: Int64s,
    order_K: Int64s,
    gradient_KD: Float32s,
    lr: float,
    eps: float,
) -> None:
    """Update rows as `update_sgd`, their steps divided by the root of the squares until now.

    Args:
        weights_RD: rows of all tables, changed in place.
        squares_RC: likewise; C = D sums each element's squares, C = 1 the mean of those of a row.
        rows_K: the row of each gradient.
        order_K: sorts `rows_K`; gradients of a row are summed in it.
        gradient_KD: of the rows.
        lr: learning rate.
        eps: added to the root.
    """
    dim = weights_RD.shape[1]
    sum_D = np.empty(dim, np.float32)
    rate, floor, k = np.float32(lr), np.float32(eps), 0
    while k < order_K.size:
        row = rows_K[order_K[k]]
        k = _summed(rows_K, order_K, gradient_KD, k, sum_D)
        if squares_RC.shape[1] == 1:
            squares = np.float32(0)
            for column in range(dim):
                squares += sum_D[column] * sum_D[column]
            squares_RC[row, 0] += squares / np.float32(dim)
            step = rate / (np.sqrt(squares_RC[row, 0]) + floor)
            for column in range(dim):
                weights_RD[row, column] -= step * sum_D[column]
        else:
            for column in range(dim):
                squares_RC[row, column] += sum_D[column] * sum_D[column]
                root = np.sqrt(squares_RC[row, column]) + floor
                weights_RD[row, column] -= rate * sum_D[column] / root
