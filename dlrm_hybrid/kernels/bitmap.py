"""Indices as a bitmap, and back.

Shapes: K indices, W = ceil(N / 64) words for N elements; bit i of word w is element 64 w + i.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Int32s = npt.NDArray[np.int32]
Words = npt.NDArray[np.uint64]


@kernel
def set_bits(indices_K: Int32s, count: int, words_W: Words) -> bool:
    """Write the bitmap of `indices_K`; False if they do not rise, or leave 0 … `count` - 1."""
    previous = np.int64(-1)
    at = np.int64(0)
    word = np.uint64(0)
    for k in range(indices_K.size):
        index = np.int64(indices_K[k])
        if index <= previous or index >= count:
            return False
        previous = index
        while at < index >> 6:
            words_W[at] = word
            word = np.uint64(0)
            at += 1
        word |= np.uint64(1) << np.uint64(index & 63)
    while at < words_W.size:
        words_W[at] = word
        word = np.uint64(0)
        at += 1
    return True


@kernel
def list_bits(words_W: Words, count: int, indices_K: Int32s) -> bool:
    """Write the elements whose bit is set, ascending; False unless they are K below `count`."""
    found = 0
    for at in range(words_W.size):
        word = words_W[at]
        while word != np.uint64(0):
            index = (at << 6) + trailing_zeros(word)
            if found == indices_K.size or index >= count:
                return False
            indices_K[found] = index
            found += 1
            word &= word - np.uint64(1)
    return found == indices_K.size


@kernel
def rising(indices_K: Int32s, count: int) -> bool:
    """Whether every index is larger than the one before, from 0 to `count` - 1."""
    if indices_K.size == 0:
        return True
    falls = indices_K[0] < 0 or indices_K[-1] >= count
    for k in range(1, indices_K.size):
        falls |= indices_K[k] <= indices_K[k - 1]
    return not falls
