"""Stored records to the arrays of a batch, in one pass.

Shapes: R rows of a block, W = 40 words of a record (data/format.py), B rows gathered,
I = 13 integer features, F = 26 categorical features.
"""

from __future__ import annotations

from typing import Annotated

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import READ_ONLY, kernel

# Feature-major writes go to 26 places that lie B words apart: a tile's worth of records stays in
# the first cache while they are read 26 times (a row at a time costs 5 times more at B = 2048).
TILE = 32
DENSE = 13
CATEGORICAL = 26


@kernel
def gather(
    floats_RW: Annotated[npt.NDArray[np.float32], READ_ONLY],
    integers_RW: Annotated[npt.NDArray[np.int32], READ_ONLY],
    order_B: npt.NDArray[np.uint32],
    first: int,
    dense_BI: npt.NDArray[np.float32],
    ids_FB: npt.NDArray[np.int64],
    label_B: npt.NDArray[np.float32],
    table_rows_F: npt.NDArray[np.int64],
) -> bool:
    """Write record `order_B[b]` of a block to row `first + b` of a batch.

    Returns whether a model can be trained on all of them: labels 0 or 1, finite dense features, ids
    within their tables.

    Args:
        floats_RW: the records read as float32; label and dense features are taken from it.
        integers_RW: the same memory read as int32; ids are taken from it.
        order_B: uint32, rows of the block.
        first: row of the batch that receives `order_B[0]`.
        dense_BI: receives log(x + 1).
        ids_FB: receives ids, feature-major.
        label_B: receives 0 or 1.
        table_rows_F: int64, rows of each embedding table.
    """
    good = True
    count = order_B.shape[0]
    for start in range(0, count, TILE):
        stop = min(count, start + TILE)
        for b in range(start, stop):
            row = order_B[b]
            label = floats_RW[row, 0]
            label_B[first + b] = label
            good &= (label == 0) | (label == 1)
            for i in range(DENSE):
                x = floats_RW[row, 1 + i]
                dense_BI[first + b, i] = x
                good &= x - x == 0  # not of an infinity, not of NaN
        for f in range(CATEGORICAL):
            rows = table_rows_F[f]
            for b in range(start, stop):
                index = np.int64(integers_RW[order_B[b], 1 + DENSE + f])
                ids_FB[f, first + b] = index
                good &= (index >= 0) & (index < rows)
    return good
