"""Rows of embedding tables where every bag is one id: looked up, and taught by SGD.

All tables lie one behind the other in one array. FBGEMM does the same for any bags and optimizers
and gives the same bits, but takes half a millisecond for a call.

Shapes: N elements of all tables, F tables, B rows of a batch, D embedding dimension, Q = D / 4.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import fused_multiply_add
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
Quads = npt.NDArray[np.complex128]  # four float32 that move together

TILE = 64  # rows of a batch that are written for all tables while they are in the first cache


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
    for tile in range(0, rows, TILE):
        for table in range(tables):
            start = starts_F[table] // 4
            for row in range(tile, min(tile + TILE, rows)):
                chosen = ids_FB[table, row]
                if chosen < 0 or chosen >= rows_F[table]:
                    return table * rows + row
                first = start + chosen * quads
                for quad in range(quads):
                    out_BFQ[row, table, quad] = weights_N[first + quad]
    return -1


@kernel
def learn_sgd(
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
