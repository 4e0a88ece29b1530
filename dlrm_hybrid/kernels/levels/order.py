"""The elements of several matrices in the order of how often their rows and columns are sent.

Rows and columns have classes, one for each halving of their frequency, and the elements of a tensor
where two classes meet are a block: all are sent about as often. Blocks come in the order of what
row and column promise together, their *group*, so a few groups hold most of what is sent.

Shapes: N elements of T tensors, K of them sent, R rows and C columns of all tensors, B blocks, G
groups; E is one more than what an offset is of.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from dlrm_hybrid.arrays import Int32s, Int64s
from dlrm_hybrid.kernels.jit import kernel

CLASSES = 16  # of rows, and of columns
GROUPS = 16


class Order(NamedTuple):
    """The elements of T matrices, by how often they are sent.

    Attributes:
        row_E: where the rows of each tensor begin among the R, then R.
        col_E: the same of columns.
        rows_R2: class of each row, and its number among those of that class.
        cols_C2: the same of columns.
        blocks_TXY: of each class of rows and of columns; its number in order, or -1.
        starts_E: where each block begins, then N.
        blocks_B4: tensor, columns, first in `by_row_R` and first in `by_col_C`.
        by_row_R: rows of each tensor by class.
        by_col_C: the same of columns.
        ends_G: where each group ends.
    """

    row_E: Int64s
    col_E: Int64s
    rows_R2: Int32s
    cols_C2: Int32s
    blocks_TXY: Int32s
    starts_E: Int64s
    blocks_B4: Int32s
    by_row_R: Int32s
    by_col_C: Int32s
    ends_G: Int64s


@kernel
def count_places(
    row_E: Int64s,
    col_E: Int64s,
    splits_E: Int64s,
    local_K: Int32s,
    row_counts_R: Int64s,
    col_counts_C: Int64s,
    counts_T: Int64s,
) -> None:
    """Count how often rows, columns and tensors were sent."""
    for tensor in range(splits_E.size - 1):
        width = col_E[tensor + 1] - col_E[tensor]
        row, end = row_E[tensor], width
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            while local_K[k] >= end:
                row += 1
                end += width
            row_counts_R[row] += 1
            col_counts_C[col_E[tensor] + local_K[k] - end + width] += 1
        counts_T[tensor] += splits_E[tensor + 1] - splits_E[tensor]


@kernel
def sort_by_order(
    order: Order, splits_E: Int64s, local_K: Int32s, positions_K: Int32s, source_K: Int32s
) -> None:
    """The elements' positions in order, increasing, and which element each is of.

    Args:
        order: of the elements.
        splits_E: where the elements of each tensor begin among the K, then K.
        local_K: their indices in their tensors, increasing in each.
        positions_K: receives the positions.
        source_K: receives which of the K each is of.
    """
    block_K = np.empty(local_K.size, np.int32)
    place_K = np.empty(local_K.size, np.int32)
    ends_E = np.zeros(order.starts_E.size + 1, np.int32)
    for tensor in range(splits_E.size - 1):
        col_first = order.col_E[tensor]
        width = order.col_E[tensor + 1] - col_first
        row, end = order.row_E[tensor], width
        for k in range(splits_E[tensor], splits_E[tensor + 1]):
            while local_K[k] >= end:
                row += 1
                end += width
            col = col_first + local_K[k] - end + width
            block = order.blocks_TXY[tensor, order.rows_R2[row, 0], order.cols_C2[col, 0]]
            block_K[k] = block
            offset = order.rows_R2[row, 1] * order.blocks_B4[block, 1] + order.cols_C2[col, 1]
            place_K[k] = order.starts_E[block] + offset
            ends_E[block + 1] += 1
    for block in range(1, ends_E.size):
        ends_E[block] += ends_E[block - 1]
    # In a block they keep their order, so they increase.
    for k in range(local_K.size):
        at = ends_E[block_K[k]]
        ends_E[block_K[k]] = at + 1
        positions_K[at] = place_K[k]
        source_K[at] = k
