"""Which form takes the fewest bytes for some elements of a tensor, and how many.

`wire.sparse` says what the forms are, `kernels.write_sections` writes them. RICE has one parameter
for all gaps of a tensor: those of a real gradient's rows do not stay alike from one dozen to the
next, so a parameter that follows them costs more than the best single one.

Shapes: K indices, of all T tensors in `choose_forms`, where these lie between E = T + 1 places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

WHOLE, INDEX32, BITMAP, RICE, ROWS = range(1, 6)
MAX_COLUMNS = 256

_HEAD_BYTES = 4
_MAX_RICE = (1 << 27) - 1  # indices that the head can count
_SAMPLE = 256
_MOST_ONES = 24
_ESCAPE_BITS = _MOST_ONES + 32


@kernel
def _code_bits(gap: int, parameter: int) -> int:
    ones = gap >> parameter
    return ones + 1 + parameter if ones < _MOST_ONES else _ESCAPE_BITS


@kernel
def _bits(indices_K: Int32s, parameter: int) -> tuple[int, int, int]:
    """Length of all codes with the parameter below, if there is one, this one and the one above."""
    below = max(parameter - 1, 0)
    fewer, bits, more = 0, 0, 0
    previous = np.int64(-1)
    for k in range(indices_K.size):
        gap = np.int64(indices_K[k]) - previous - 1
        previous = np.int64(indices_K[k])
        fewer += _code_bits(gap, below)
        bits += _code_bits(gap, parameter)
        more += _code_bits(gap, parameter + 1)
    return fewer, bits, more


@kernel
def _likely(indices_K: Int32s) -> int:
    """The best parameter for up to `_SAMPLE` gaps, taken at equal distances."""
    size = indices_K.size
    stride = (size + _SAMPLE - 1) // _SAMPLE
    gaps = np.empty((size + stride - 1) // stride, np.int64)
    # No code is shorter with more low bits than the largest gap has.
    gaps[0] = largest = np.int64(indices_K[0])
    for k in range(1, gaps.size):
        gaps[k] = np.int64(indices_K[k * stride]) - np.int64(indices_K[k * stride - 1]) - 1
        largest = max(largest, gaps[k])
    best = 0
    fewest = np.int64(0)
    parameter = 0
    while True:
        bits = np.int64(0)
        for k in range(gaps.size):
            bits += _code_bits(gaps[k], parameter)
        if parameter == 0 or bits < fewest:
            best = parameter
            fewest = bits
        if largest >> parameter == 0:
            return best
        parameter += 1


@kernel
def rising(indices_K: Int32s, count: int) -> bool:
    """Whether every index is larger than the one before, from 0 to `count` - 1."""
    if indices_K.size == 0:
        return True
    falls = indices_K[0] < 0 or indices_K[-1] >= count
    for k in range(1, indices_K.size):
        falls |= indices_K[k] <= indices_K[k - 1]
    return not falls


@kernel
def fit(indices_K: Int32s) -> tuple[int, int]:
    """A parameter that makes `encode` short, and the length in bits, of at least one index.

    The best one for a sample, or from there downhill as long as that is shorter: the best of all
    if there are no more than 256 indices. They rise.
    """
    parameter = _likely(indices_K)
    fewer, bits, more = _bits(indices_K, parameter)
    if indices_K.size <= _SAMPLE:
        return parameter, bits
    while fewer < bits:
        parameter -= 1
        fewer, bits, more = _bits(indices_K, parameter)
    while more < bits:
        parameter += 1
        fewer, bits, more = _bits(indices_K, parameter)
    return parameter, bits


@kernel
def _filled(num_bytes: int, value_bytes: int) -> int:
    return (num_bytes + value_bytes - 1) // value_bytes * value_bytes


@kernel
def _has_full_row(indices_K: Int32s) -> bool:
    """Whether rising indices hold all of some row of MAX_COLUMNS, one more than a byte counts."""
    last = MAX_COLUMNS - 1
    full = False
    for k in range(indices_K.size - last):
        full |= indices_K[k] % MAX_COLUMNS == 0 and indices_K[k + last] == indices_K[k] + last
    return full


@kernel
def _shortest(
    indices_K: Int32s, count: int, width: int, allow_rice: bool, value_bytes: int
) -> tuple[int, int, int]:
    """Form, bytes up to the values, and parameter; the form is -1 if the indices do not rise."""
    size = indices_K.size
    if size == count:
        return WHOLE, 0, 0
    if size == 0:
        return INDEX32, 0, 0
    if not rising(indices_K, count):
        return -1, 0, 0
    form, num_bytes, parameter = INDEX32, 4 * size, 0
    other = _filled((count + 7) // 8, value_bytes)
    if other < num_bytes:
        form, num_bytes = BITMAP, other
    if 0 < width <= MAX_COLUMNS:
        other = _filled(count // width + size, value_bytes)
        if other < num_bytes and not (width == MAX_COLUMNS and _has_full_row(indices_K)):
            form, num_bytes = ROWS, other
    if allow_rice and 2 * size <= count and size <= _MAX_RICE:
        parameter, bits = fit(indices_K)
        other = _filled(_HEAD_BYTES + (bits + 7) // 8, value_bytes)
        if other < num_bytes:
            form, num_bytes = RICE, other
    return form, num_bytes, parameter


@kernel
def choose_forms(
    counts_T: Int64s,
    bounds_E: Int64s,
    width: int,
    allow_rice: bool,
    value_bytes: int,
    indices_K: Int32s,
    forms_T3: Int64s,
) -> int:
    """Find the form of the indices of each tensor that takes the fewest bytes.

    Of forms that take as many INDEX32 goes before BITMAP, ROWS and RICE. RICE is tried up to one
    element in two; above that a bitmap is as short for random indices. Indices are filled up to a
    multiple of a value's size.

    Args:
        counts_T: elements of each tensor.
        bounds_E: where the indices of each begin, and the end of the last.
        width: of the matrices that all tensors are; 0 for no ROWS.
        allow_rice: whether RICE may be chosen.
        value_bytes: of a value.
        indices_K: positions in their tensors.
        forms_T3: receives the form, the bytes of the indices, and the parameter of RICE.

    Returns:
        the first tensor whose indices do not rise from 0 to its count - 1, or -1.
    """
    for tensor in range(counts_T.size):
        chosen_K = indices_K[bounds_E[tensor] : bounds_E[tensor + 1]]
        count = counts_T[tensor]
        form, num_bytes, parameter = _shortest(chosen_K, count, width, allow_rice, value_bytes)
        if form < 0:
            return tensor
        forms_T3[tensor, 0], forms_T3[tensor, 1], forms_T3[tensor, 2] = form, num_bytes, parameter
    return -1
