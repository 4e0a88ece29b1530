"""Flat indices of a matrix as a count per row and a position in the row, one byte each, and back.

Shapes: K indices, B rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

FULL, UNORDERED = 1, 2  # why rows cannot be split

_MOST = 255


@kernel
def split_rows(indices_K: Int32s, width: int, counts_B: Bytes, positions_K: Bytes) -> int:
    """Write rows of `width` <= 256 columns; 0, or why it cannot be done.

    Returns:
        0; FULL if a row has 256 elements; UNORDERED if indices do not rise inside the B rows.
    """
    at = 0
    for row in range(counts_B.size):
        start = row * width
        first = at
        previous = -1
        while at < indices_K.size and indices_K[at] < start + width:
            position = indices_K[at] - start
            if position <= previous:
                return UNORDERED
            previous = position
            positions_K[at] = position
            at += 1
        if at - first > _MOST:
            return FULL
        counts_B[row] = at - first
    return 0 if at == indices_K.size else UNORDERED


@kernel
def join_rows(counts_B: Bytes, positions_K: Bytes, width: int, indices_K: Int32s) -> bool:
    """Write the indices; False unless positions rise in each row of `width`, K in all."""
    at = np.int64(0)
    for row in range(counts_B.size):
        start = row * width
        end = at + np.int64(counts_B[row])
        if end > positions_K.size:
            return False
        previous = np.int64(-1)
        good = True
        for k in range(at, end):
            position = np.int64(positions_K[k])
            good &= previous < position
            previous = position
            indices_K[k] = start + position
        if not good or previous >= width:
            return False
        at = end
    return at == positions_K.size
