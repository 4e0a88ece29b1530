"""Golomb-Rice coded gaps back into rising indices; `kernels.rice` says how they are coded.

Shapes: K indices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import load64, trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

_MOST_ONES = 24
_ESCAPE_BITS = _MOST_ONES + 32
_STOP = np.uint64(1 << _MOST_ONES)
_GAP = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)


@kernel
def _tail(data: Bytes, at: int) -> np.uint64:
    """As `load64`, with zeros for bytes behind the end."""
    word = np.uint64(0)
    for byte in range(at, data.size):
        word |= np.uint64(data[byte]) << np.uint64(8 * (byte - at))
    return word


@kernel
def decode(data: Bytes, first: int, parameter: int, count: int, indices_K: Int32s) -> int:
    """Read K codes that begin at byte `first`; any bytes are safe to read.

    Returns:
        the byte behind the codes, or -1 if an index is not below `count`. The byte may lie behind
        the end of `data`.
    """
    shift = np.uint64(parameter)
    low = (_ONE << shift) - _ONE
    at = np.int64(first) * 8
    index = np.int64(-1)
    for k in range(indices_K.size):
        byte = at >> 3
        word = load64(data, byte) if byte + 8 <= data.size else _tail(data, byte)
        word >>= np.uint64(at & 7)
        ones = trailing_zeros(~word | _STOP)
        if ones < _MOST_ONES:
            rest = (word >> np.uint64(ones + 1)) & low
            index += np.int64((np.uint64(ones) << shift) | rest) + 1
            at += ones + 1 + parameter
        else:
            index += np.int64((word >> np.uint64(_MOST_ONES)) & _GAP) + 1
            at += _ESCAPE_BITS
        if index >= count:
            return -1
        indices_K[k] = index
    return (at + 7) >> 3
