"""The nearest bfloat16, for kernels that round on the way; inlined into them, as `bits` is."""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET = np.uint32(0x00400000)
_ONE = np.uint32(1)
_SHIFT = np.uint32(16)
# What of a float32's fraction is dropped, half of that less one, and the largest bfloat16.
_DROPPED, _HALF, _LARGEST = np.uint32(0xFFFF), np.uint32(0x7FFF), np.uint32(0x7F7F0000)


@register_jitable
def nearest_bfloat16(word: np.uint32) -> np.uint32:
    """Bits of the bfloat16, as a float32, that is nearest to the float32 with these bits.

    Ties go to the even one; what is finite stays finite, NaN stays NaN. No branches.
    """
    size = np.uint32(word & _MAGNITUDE)
    even = np.uint32(np.uint32(size >> _SHIFT) & _ONE)
    rounded = np.uint32(np.uint32(size + np.uint32(_HALF + even)) & ~_DROPPED)
    rounded = min(rounded, _LARGEST)
    special = np.uint32(np.uint32(size | (_QUIET if size > _INFINITY else 0)) & ~_DROPPED)
    return np.uint32((word & _SIGN) | (special if size >= _INFINITY else rounded))
