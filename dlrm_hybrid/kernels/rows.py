"""Rows of embedding tables: looked up, and updated by the gradients of those that were.

All tables of a process lie in one array, one after the other. A gradient has a key: the number of
its row among those of all tables, then the number of the gradient. Sorted keys bring the gradients
of a row together, in their order, whatever tables and bags they are from.

Shapes: F tables, R rows of all, D embedding dimension, Q = D / 4; B rows of a batch, E = F B + 1
offsets of bags; K ids, G gradients; C = D numbers of state for each row, or one for the row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba.extending import register_jitable

from dlrm_hybrid.arrays import Float32s, Float64s, Int64s
from dlrm_hybrid.kernels.bits import fused_multiply_add
from dlrm_hybrid.kernels.jit import kernel

Quads = npt.NDArray[np.complex128]  # four float32 that move together


class Gradients(NamedTuple):
    """Of rows that were looked up.

    Attributes:
        keys_K: row << shift | gradient, ascending; gradients of a row are summed in this order.
        shift: 2**shift is at least G.
        values_GD: of rows, or of bags that have several.
    """

    keys_K: Int64s
    shift: int
    values_GD: Float32s


class AdamRates(NamedTuple):
    """Rates of one Adam step for the rows of all tables.

    Attributes:
        ends_F: one past the last row of each table.
        rates_F2: what multiplies the means of each table, and what is added to the roots.
        beta1: what is kept of a mean.
        beta2: of a mean of squares.
    """

    ends_F: Int64s
    rates_F2: Float64s
    beta1: float
    beta2: float


_DIGIT_BITS = 10  # of a row's number, by which keys are sorted at a time
_TILE = 64  # rows of a batch that are written for all tables while they are in the first cache


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


@register_jitable(inline="always")  # of the call alone an update would take twice as long
def _summed(
    given: Gradients, first: int, weights_RD: Float32s, decay: float, sum_D: Float32s
) -> int:
    """Sum the gradients of one row, in their order; where in the keys those of the next begin."""
    keys_K, shift, values_GD = given
    dim, mask = sum_D.size, (1 << shift) - 1
    row, gradient = keys_K[first] >> shift, keys_K[first] & mask
    for column in range(dim):
        sum_D[column] = values_GD[gradient, column]
    end = first + 1
    while end < keys_K.size and keys_K[end] >> shift == row:
        gradient = keys_K[end] & mask
        for column in range(dim):
            sum_D[column] += values_GD[gradient, column]
        end += 1
    if decay != 0.0:
        for column in range(dim):
            sum_D[column] += np.float32(decay) * weights_RD[row, column]
    return end


@kernel
def update_sgd(
    weights_RD: Float32s,
    given: Gradients,
    lr: float,
    decay: float,
) -> None:
    """Take from rows their learning rate times the sum of their gradients.

    Args:
        weights_RD: rows of all tables, changed in place.
        given: gradients of rows.
        lr: learning rate.
        decay: times the row is added to the sum.
    """
    dim = weights_RD.shape[1]
    sum_D = np.empty(dim, np.float32)
    falling, k = np.float32(-lr), 0
    while k < given.keys_K.size:
        row = given.keys_K[k] >> given.shift
        k = _summed(given, k, weights_RD, decay, sum_D)
        for column in range(dim):
            weights_RD[row, column] = fused_multiply_add(
                falling, sum_D[column], weights_RD[row, column]
            )


@kernel
def update_adagrad(
    weights_RD: Float32s,
    squares_RC: Float32s,
    given: Gradients,
    lr: float,
    eps: float,
    decay: float,
) -> None:
    """Update rows as `update_sgd`, their steps divided by the root of the squares until now.

    Args:
        weights_RD: rows of all tables, changed in place.
        squares_RC: likewise; C = D sums each element's squares, C = 1 the mean of those of a row.
        given: gradients of rows.
        lr: learning rate.
        eps: added to the root.
        decay: as of `update_sgd`.
    """
    dim = weights_RD.shape[1]
    sum_D = np.empty(dim, np.float32)
    rate, floor, k = np.float32(lr), np.float32(eps), 0
    while k < given.keys_K.size:
        row = given.keys_K[k] >> given.shift
        k = _summed(given, k, weights_RD, decay, sum_D)
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


@kernel
def update_adam(
    weights_RD: Float32s,
    means_RD: Float32s,
    squares_RC: Float32s,
    given: Gradients,
    rates: AdamRates,
    decay: float,
) -> None:
    """Update rows as `update_sgd`, by their running mean over the root of that of squares.

    Args:
        weights_RD: rows of all tables, changed in place.
        means_RD: running means of gradients, likewise.
        squares_RC: of squares, likewise; C = 1 takes the mean of those of a row.
        given: gradients of rows.
        rates: how they move.
        decay: as of `update_sgd`.
    """
    dim = weights_RD.shape[1]
    sum_D = np.empty(dim, np.float32)
    new_mean, new_square = np.float32(1 - rates.beta1), np.float32(1 - rates.beta2)
    table = k = 0
    while k < given.keys_K.size:
        row = given.keys_K[k] >> given.shift
        while row >= rates.ends_F[table]:
            table += 1
        rate = np.float32(rates.rates_F2[table, 0])
        floor = np.float32(rates.rates_F2[table, 1])
        k = _summed(given, k, weights_RD, decay, sum_D)
        for column in range(dim):
            means_RD[row, column] += new_mean * (sum_D[column] - means_RD[row, column])
        if squares_RC.shape[1] == 1:
            squares = np.float32(0)
            for column in range(dim):
                squares += sum_D[column] * sum_D[column]
            squares_RC[row, 0] += new_square * (squares / np.float32(dim) - squares_RC[row, 0])
            step = rate / (np.sqrt(squares_RC[row, 0]) + floor)
            for column in range(dim):
                weights_RD[row, column] -= step * means_RD[row, column]
        else:
            for column in range(dim):
                square = sum_D[column] * sum_D[column]
                squares_RC[row, column] += new_square * (square - squares_RC[row, column])
                root = np.sqrt(squares_RC[row, column]) + floor
                weights_RD[row, column] -= rate * means_RD[row, column] / root


@kernel
def bag_keys(
    ids_K: Int64s,
    offsets_E: Int64s,
    starts_F: Int64s,
    rows_F: Int64s,
    bags: int,
    shift: int,
    keys_K: Int64s,
) -> int:
    """The key of each id; bag b of table f has the gradient b F + f.

    Args:
        ids_K: of the bags of one table after the other.
        offsets_E: where in them each bag begins, and their number.
        starts_F: first row of each table.
        rows_F: of each table.
        bags: B, of each table.
        shift: 2**shift is at least the number of all bags.
        keys_K: receives row << shift | gradient.

    Returns:
        -1; or, if an id is not a row of its table, its place in `ids_K`.
    """
    tables = starts_F.size
    for table in range(tables):
        for bag in range(bags):
            first = table * bags + bag
            for k in range(offsets_E[first], offsets_E[first + 1]):
                if ids_K[k] < 0 or ids_K[k] >= rows_F[table]:
                    return k
                keys_K[k] = (starts_F[table] + ids_K[k]) << shift | (bag * tables + table)
    return -1


@kernel
def sort_by_row(keys_K: Int64s, rows: int, shift: int) -> Int64s:
    """Sort keys of which those of a row are in order already, as those of `bag_keys` are.

    Digit by digit of the rows' numbers, from the lowest: comparisons take several times as long.

    Args:
        keys_K: row << shift | gradient; overwritten.
        rows: of all tables.
        shift: 2**shift is at least the number of gradients.

    Returns:
        them in ascending order, in this array or another.
    """
    digits = 0
    while (rows - 1) >> (_DIGIT_BITS * digits) > 0:
        digits += 1
    places_PV = np.zeros((digits, 1 << _DIGIT_BITS), np.int64)  # P digits of V values
    mask = (1 << _DIGIT_BITS) - 1
    for key in keys_K:
        for digit in range(digits):
            places_PV[digit, (key >> (shift + _DIGIT_BITS * digit)) & mask] += 1
    sorted_K = np.empty_like(keys_K)
    for digit in range(digits):
        place, low = 0, shift + _DIGIT_BITS * digit
        for value in range(mask + 1):
            count = places_PV[digit, value]
            places_PV[digit, value] = place
            place += count
        for key in keys_K:
            value = (key >> low) & mask
            sorted_K[places_PV[digit, value]] = key
            places_PV[digit, value] += 1
        keys_K, sorted_K = sorted_K, keys_K
    return keys_K
