"""Rising indices as Golomb-Rice coded gaps, and back.

The gap before an index is how many elements lie between it and the one before. Its code with
parameter r is gap >> r ones, a zero, and the r low bits of the gap; where that takes 24 ones or
more it is 24 ones and the gap in 32 bits. So no code is longer than 56 bits, and one window of 64
holds it wherever it starts. Bits fill bytes from the lowest on.

One parameter for all: gaps of a real gradient's rows do not stay alike from one dozen to the next,
so a parameter that follows them costs more than the best single one. (S. W. Golomb, IEEE Trans.
Inf. Theory 12, 1966; R. F. Rice, JPL 79-22, 1979.)

Shapes: K indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from dlrm_hybrid.kernels.bits import trailing_zeros
from dlrm_hybrid.kernels.jit import kernel

Int32s = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

STORE_BYTES = 8  # the encoder writes so many at a time

_SAMPLE = 256
_MOST_LOW_BITS = 31
_MOST_ONES = 24
_ESCAPE_BITS = _MOST_ONES + 32
_ONES = np.uint64((1 << _MOST_ONES) - 1)
_STOP = np.uint64(1 << _MOST_ONES)
_GAP = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_WORD = ir.IntType(64)


@intrinsic
def _load64(_typing: Any, data: Any, at: Any) -> Any:
    """_load64(data, at): bytes `at` to `at + 8` as uint64, at any address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(start, [arguments[1]]), _WORD.as_pointer())
        return builder.load(pointer, align=1)

    return types.uint64(data, types.int64), generate


@intrinsic
def _store64(_typing: Any, data: Any, at: Any, word: Any) -> Any:
    """_store64(data, at, word): the opposite of `_load64`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        start = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        pointer = builder.bitcast(builder.gep(start, [arguments[1]]), _WORD.as_pointer())
        builder.store(arguments[2], pointer, align=1)
        return context.get_dummy_value()

    return types.void(data, types.int64, types.uint64), generate


@kernel
def _bits(indices_K: Int32s, parameter: int) -> int:
    """Length of all codes."""
    first = np.int64(indices_K[0]) >> parameter
    bits = first + 1 + parameter if first < _MOST_ONES else _ESCAPE_BITS
    for k in range(1, indices_K.size):
        ones = (np.int64(indices_K[k]) - np.int64(indices_K[k - 1]) - 1) >> parameter
        bits += ones + 1 + parameter if ones < _MOST_ONES else _ESCAPE_BITS
    return bits


@kernel
def _likely(indices_K: Int32s) -> int:
    """The best parameter for up to `_SAMPLE` gaps, taken at equal distances."""
    size = indices_K.size
    stride = (size + _SAMPLE - 1) // _SAMPLE
    gaps = np.empty((size + stride - 1) // stride, np.int64)
    gaps[0] = indices_K[0]
    for k in range(1, gaps.size):
        gaps[k] = np.int64(indices_K[k * stride]) - np.int64(indices_K[k * stride - 1]) - 1
    # No code is shorter with more low bits than the largest gap has.
    largest = gaps.max()
    best = 0
    fewest = np.int64(0)
    parameter = 0
    while True:
        bits = np.int64(0)
        for k in range(gaps.size):
            ones = gaps[k] >> parameter
            bits += ones + 1 + parameter if ones < _MOST_ONES else _ESCAPE_BITS
        if parameter == 0 or bits < fewest:
            best = parameter
            fewest = bits
        if largest >> parameter == 0:
            return best
        parameter += 1


@kernel
def fit(indices_K: Int32s, count: int) -> tuple[int, int]:
    """A parameter that makes `encode` short, and the length in bits.

    The best one for a sample, or from there downhill as long as that is shorter: the best of all
    if there are no more than 256 indices.

    Returns:
        parameter and bits; bits are -1 if the indices do not rise from 0 to `count` - 1. There is
        at least one index.
    """
    falls = indices_K[0] < 0 or indices_K[-1] >= count
    for k in range(1, indices_K.size):
        falls |= indices_K[k] <= indices_K[k - 1]
    if falls:
        return 0, -1
    parameter = _likely(indices_K)
    bits = _bits(indices_K, parameter)
    if indices_K.size <= _SAMPLE:
        return parameter, bits
    for step in (-1, 1):
        while 0 <= parameter + step <= _MOST_LOW_BITS:
            other = _bits(indices_K, parameter + step)
            if other >= bits:
                break
            parameter += step
            bits = other
    return parameter, bits


@kernel
def encode(indices_K: Int32s, parameter: int, out: Bytes) -> None:
    """Write the codes of rising indices; `out` has room for them and STORE_BYTES more.

    Bytes behind the codes are zero, up to a multiple of STORE_BYTES or further.
    """
    shift = np.uint64(parameter)
    low = (_ONE << shift) - _ONE
    at = np.int64(0)
    filled = np.uint64(0)
    word = np.uint64(0)
    previous = np.int64(-1)
    for k in range(indices_K.size):
        gap = np.uint64(np.int64(indices_K[k]) - previous - 1)
        previous = np.int64(indices_K[k])
        ones = gap >> shift
        if ones < np.uint64(_MOST_ONES):
            code = ((_ONE << ones) - _ONE) | ((gap & low) << (ones + _ONE))
            length = ones + _ONE + shift
        else:
            code = _ONES | (gap << np.uint64(_MOST_ONES))
            length = np.uint64(_ESCAPE_BITS)
        word |= code << filled
        _store64(out, at, word)
        filled += length
        at += np.int64(filled >> np.uint64(3))
        word >>= filled & ~np.uint64(7) & np.uint64(63)
        filled &= np.uint64(7)
    _store64(out, at, word)


@kernel
def _tail(data: Bytes, at: int) -> np.uint64:
    """As `_load64`, with zeros for bytes behind the end."""
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
        word = _load64(data, byte) if byte + 8 <= data.size else _tail(data, byte)
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
