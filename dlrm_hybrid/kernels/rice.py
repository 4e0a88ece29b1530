"""Rising indices as Golomb-Rice coded gaps, and in the shortest form of several tensors at once.

The gap before an index is how many elements lie between it and the one before. Its code with
parameter r is gap >> r ones, a zero, and the r low bits of the gap; where that takes 24 ones or
more it is 24 ones and the gap in 32 bits. So no code is longer than 56 bits, and one window of 64
holds it wherever it starts. Bits fill bytes from the lowest on.

One parameter for all: gaps of a real gradient's rows do not stay alike from one dozen to the next,
so a parameter that follows them costs more than the best single one. (S. W. Golomb, IEEE Trans.
Inf. Theory 12, 1966; R. F. Rice, JPL 79-22, 1979.)

`kernels.rice_decode` reads them. Sections of all tensors of a push are written in one call, for to
call a kernel takes as long as to code a hundred indices.

Shapes: K indices, of all T tensors in `write_sections`, where these lie between E = T + 1 places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import store64
from dlrm_hybrid.kernels.jit import kernel

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

STORE_BYTES = 8  # the encoder writes so many at a time

# How `write_sections` has written indices: not at all, for all are there; 4 bytes each; a bit for
# every element; a head of HEAD_BYTES, then coded gaps.
WHOLE, INDEX32, BITMAP, RICE = range(4)
HEAD_BYTES = 4
COUNT_BITS = 27  # of the head; the parameter is above
MAX_RICE = (1 << COUNT_BITS) - 1  # indices

_SAMPLE = 256
_MOST_LOW_BITS = 31
_MOST_ONES = 24
_ESCAPE_BITS = _MOST_ONES + 32
_ONES = np.uint64((1 << _MOST_ONES) - 1)
_ONE = np.uint64(1)


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
def _rise(indices_K: Int32s, count: int) -> bool:
    """Whether all lie from 0 to `count` - 1, each above the one before; there is at least one."""
    falls = indices_K[0] < 0 or indices_K[-1] >= count
    for k in range(1, indices_K.size):
        falls |= indices_K[k] <= indices_K[k - 1]
    return not falls


@kernel
def fit(indices_K: Int32s, count: int) -> tuple[int, int]:
    """A parameter that makes `encode` short, and the length in bits.

    The best one for a sample, or from there downhill as long as that is shorter: the best of all
    if there are no more than 256 indices.

    Returns:
        parameter and bits; bits are -1 if the indices do not rise from 0 to `count` - 1. There is
        at least one index.
    """
    if not _rise(indices_K, count):
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
        store64(out, at, word)
        filled += length
        at += np.int64(filled >> np.uint64(3))
        word >>= filled & ~np.uint64(7) & np.uint64(63)
        filled &= np.uint64(7)
    store64(out, at, word)


@kernel
def _shortest(indices_K: Int32s, count: int, value_bytes: int) -> tuple[int, int, int]:
    """Form, bytes up to the values, and parameter; the form is -1 if the indices do not rise."""
    if indices_K.size == count:
        return WHOLE, 0, 0
    if indices_K.size == 0:
        return INDEX32, 0, 0
    form, num_bytes = INDEX32, 4 * indices_K.size
    filled = (count + 7) // 8 + value_bytes - 1
    if filled - filled % value_bytes < num_bytes:
        form, num_bytes = BITMAP, filled - filled % value_bytes
    if 2 * indices_K.size > count or indices_K.size > MAX_RICE:
        return (form if _rise(indices_K, count) else -1), num_bytes, 0
    parameter, bits = fit(indices_K, count)
    if bits < 0:
        return -1, 0, 0
    filled = HEAD_BYTES + (bits + 7) // 8 + value_bytes - 1
    if filled - filled % value_bytes < num_bytes:
        form, num_bytes = RICE, filled - filled % value_bytes
    return form, num_bytes, parameter


@kernel
def _write(indices_K: Int32s, form: int, parameter: int, out: Bytes) -> None:
    """Fill `out`, the bytes up to the values and STORE_BYTES more."""
    if form == INDEX32:
        for k in range(indices_K.size):
            store64(out, 4 * k, np.uint64(indices_K[k]))
    elif form == BITMAP:
        out[: out.size - STORE_BYTES] = 0
        for k in range(indices_K.size):
            out[indices_K[k] >> 3] |= np.uint8(1 << (indices_K[k] & 7))
    elif form == RICE:
        store64(out, 0, np.uint64(parameter << COUNT_BITS | indices_K.size))
        encode(indices_K, parameter, out[HEAD_BYTES:])


@kernel
def write_sections(
    counts_T: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values: Bytes,
    out: Bytes,
    forms_T: Int64s,
    stops_T: Int64s,
) -> int:
    """Write the indices of each tensor in the form that takes the fewest bytes, then its values.

    Where two forms take as many, the first in the order of their numbers is chosen. Indices are
    filled up with zeros to a multiple of a value's size.

    Args:
        counts_T: elements of each tensor.
        bounds_E: where the indices of each begin, and the end of the last.
        indices_K: positions in their tensors.
        values: K values of 2 or 4 bytes each.
        out: receives sections one behind the other; has room for 4 bytes per index, the values,
            and STORE_BYTES.
        forms_T: receives the form of each.
        stops_T: receives the end of each in `out`.

    Returns:
        the first tensor whose indices do not rise from 0 to its count - 1, or -1.
    """
    value_bytes = values.size // max(indices_K.size, 1)
    at = np.int64(0)
    for tensor in range(counts_T.size):
        first, last = bounds_E[tensor], bounds_E[tensor + 1]
        chosen_K = indices_K[first:last]
        form, num_bytes, parameter = _shortest(chosen_K, counts_T[tensor], value_bytes)
        if form < 0:
            return tensor
        _write(chosen_K, form, parameter, out[at : at + num_bytes + STORE_BYTES])
        at += num_bytes
        num_values = value_bytes * (last - first)
        out[at : at + num_values] = values[value_bytes * first : value_bytes * last]
        at += num_values
        forms_T[tensor] = form
        stops_T[tensor] = at
    return -1
