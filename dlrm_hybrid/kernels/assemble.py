"""Columns to row-major records.

Shapes: R rows, D = 14 words (label, 13 integers), F = 26 ids, W = 40 words of a record.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Words = npt.NDArray[np.uint32]


@kernel
def interleave(words_RD: Words, ids_FR: Words, records_RW: Words) -> int:
    """Write label, integers and ids of every row into its record; returns the clicks.

    Floats come and go as their bits; a label is a click when any bit is set.
    """
    clicks = 0
    for row in range(records_RW.shape[0]):
        clicks += words_RD[row, 0] != 0
        for word in range(14):
            records_RW[row, word] = words_RD[row, word]
        for column in range(26):
            records_RW[row, 14 + column] = ids_FR[column, row]
    return clicks
