"""Some elements of several tensors as sections, in the form that takes the fewest bytes, and back.

`wire.sparse` draws the forms; `kernels.gaps` codes the indices of RICE. All tensors of a push are
coded in one call, for to call a kernel takes as long as to code a hundred indices. Any bytes are
safe to read, and what lies in one section is never taken for a part of another.

Shapes: K indices of all T tensors, E = T + 1 offsets: where those of each tensor begin, then K.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import carray

from dlrm_hybrid.arrays import Bytes, Halves, Int32s, Int64s, Words
from dlrm_hybrid.kernels.bits import (
    floats_at,
    load64,
    nearest_bfloat16,
    store64,
    tail64,
    trailing_zeros,
)
from dlrm_hybrid.kernels.gaps import STORE_BYTES, decode_gaps, encode_gaps, fit_parameter
from dlrm_hybrid.kernels.jit import ReadOnlyBytes, kernel

DENSE, INDEX32, BITMAP, RICE, ROWS = range(1, 6)
MAX_COLUMNS = 256
SIZE, CONTENT = 0, 1  # what is wrong with a section

_HEAD_BYTES = 4  # of RICE: the parameter, and below it the number of indices
_COUNT_BITS = 27
_MAX_RICE = (1 << _COUNT_BITS) - 1
_WORD = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_HALF, _FIRST, _SECOND = np.uint64(16), np.uint64(0xFFFF), np.uint64(0xFFFF0000)


class Format(NamedTuple):
    """How sections are to be written.

    Attributes:
        width: of the matrices that all tensors are; 0 for no ROWS.
        allow_rice: whether RICE may be chosen.
        value_bytes: of a value.
    """

    width: int
    allow_rice: bool
    value_bytes: int


@kernel
def _filled(num_bytes: int, value_bytes: int) -> int:
    return (num_bytes + value_bytes - 1) // value_bytes * value_bytes


@kernel
def _increasing(indices_K: Int32s, count: int) -> bool:
    """Whether every index is larger than the one before, from 0 to `count` - 1."""
    falls = indices_K[0] < 0 or indices_K[-1] >= count
    for k in range(1, indices_K.size):
        falls |= indices_K[k] <= indices_K[k - 1]
    return not falls


@kernel
def _has_full_row(indices_K: Int32s) -> bool:
    """Whether increasing indices hold all of some row of MAX_COLUMNS, too many for a byte."""
    last = MAX_COLUMNS - 1
    full = False
    for k in range(indices_K.size - last):
        full |= indices_K[k] % MAX_COLUMNS == 0 and indices_K[k + last] == indices_K[k] + last
    return full


@kernel
def _shortest(indices_K: Int32s, count: int, format: Format) -> tuple[int, int, int]:
    """Form, bytes up to the values, and parameter; the form is -1 if indices do not increase."""
    size = indices_K.size
    width, allow_rice, value_bytes = format
    if size == count:
        return DENSE, 0, 0
    if size == 0:
        return INDEX32, 0, 0
    if not _increasing(indices_K, count):
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
        parameter, bits = fit_parameter(indices_K)
        other = _filled(_HEAD_BYTES + (bits + 7) // 8, value_bytes)
        if other < num_bytes:
            form, num_bytes = RICE, other
    return form, num_bytes, parameter


@kernel
def _write_bitmap(indices_K: Int32s, num_bytes: int, out: Bytes) -> None:
    k = 0
    for word in range((num_bytes + 7) // 8):
        bits = np.uint64(0)
        while k < indices_K.size and indices_K[k] >> 6 == word:
            bits |= _ONE << np.uint64(indices_K[k] & 63)
            k += 1
        store64(out, 8 * word, bits)


@kernel
def _read_bitmap(data: Bytes, count: int, indices_K: Int32s) -> bool:
    """Read a bitmap, which ends where `data` does; False if it does not fit the indices."""
    size = 0
    for at in range(0, data.size, 8):
        word = load64(data, at) if at + 8 <= data.size else tail64(data, at)
        while word != np.uint64(0):
            index = (at << 3) + trailing_zeros(word)
            if size == indices_K.size or index >= count:
                return False
            indices_K[size] = index
            size += 1
            word &= word - _ONE
    return size == indices_K.size


@kernel
def _write_rows(indices_K: Int32s, rows: int, width: int, out: Bytes) -> None:
    k = 0
    for row in range(rows):
        first, start = k, row * width
        while k < indices_K.size and indices_K[k] < start + width:
            out[rows + k] = indices_K[k] - start
            k += 1
        out[row] = k - first
    store64(out, rows + k, np.uint64(0))


@kernel
def _read_rows(data: Bytes, rows: int, width: int, indices_K: Int32s) -> bool:
    k = np.int64(0)
    for row in range(rows):
        start = row * width
        previous = np.int64(-1)
        good = True
        for _ in range(np.int64(data[row])):
            column = np.int64(data[rows + k])
            good &= previous < column
            previous = column
            indices_K[k] = start + column
            k += 1
        if not good or previous >= width:
            return False
    return True


@kernel
def _read_index32(data: Bytes, count: int, indices_K: Int32s) -> bool:
    good = True
    previous = np.int64(-1)
    for k in range(indices_K.size):
        word = load64(data, 4 * k) if 4 * k + 8 <= data.size else tail64(data, 4 * k)
        index = np.int64(np.int32(word & _WORD))
        good &= previous < index
        previous = index
        indices_K[k] = index
    return good and previous < count


@kernel
def _copy(data: Bytes, out: Bytes) -> None:
    words = data.size // 8
    for word in range(words):
        store64(out, 8 * word, load64(data, 8 * word))
    for byte in range(8 * words, data.size):
        out[byte] = data[byte]


@kernel
def narrow(words: Words, halves: Halves) -> None:
    """Round float32 to the upper halves of the nearest bfloat16, as `round_bfloat16` does."""
    for k in range(words.size):
        halves[k] = nearest_bfloat16(words[k]) >> np.uint32(16)


@kernel
def widen(data: ReadOnlyBytes, words: Bytes) -> None:
    """Write two bytes to the upper half of every word of four, zeros to the lower one."""
    quads = data.size // 8
    for quad in range(quads):
        four = load64(data, 8 * quad)
        for two in range(2):
            word = (four & _FIRST) << _HALF | (four & _SECOND) << np.uint64(32)
            store64(words, 16 * quad + 8 * two, word)
            four >>= np.uint64(32)
    for half in range(4 * quads, data.size // 2):
        words[4 * half] = words[4 * half + 1] = 0
        words[4 * half + 2] = data[2 * half]
        words[4 * half + 3] = data[2 * half + 1]


@kernel
def scatter_bfloat16(indices_K: Int32s, data: ReadOnlyBytes, address: int, count: int) -> None:
    """Overwrite `count` float32 at an address: bfloat16 at some indices, 0 elsewhere."""
    words_N = carray(floats_at(address), count).view(np.uint32)
    words_N[:] = 0
    for k in range(indices_K.size):
        low, high = np.uint32(data[2 * k]), np.uint32(data[2 * k + 1])
        words_N[indices_K[k]] = low << np.uint32(16) | high << np.uint32(24)


@kernel
def write_sections(
    counts_T: Int64s,
    offsets_E: Int64s,
    format: Format,
    indices_K: Int32s,
    values: Bytes,
    forms_T2: Int64s,
    out: Bytes,
) -> int:
    """Write the indices of each tensor in the form that takes the fewest bytes, then its values.

    Of forms that take as many INDEX32 goes before BITMAP, ROWS and RICE. RICE is tried up to one
    element in two; above that a bitmap is as short for random indices. Indices are filled up to a
    multiple of a value's size.

    Args:
        counts_T: elements of each tensor.
        offsets_E: of the indices.
        format: a value has as many bytes as in `values`, or 2 of the nearest bfloat16.
        indices_K: in their tensors.
        values: K values of 2 or 4 bytes each.
        forms_T2: receives the form of each section and where it ends in `out`.
        out: has room for 4 bytes and a value for each index, and STORE_BYTES.

    Returns:
        the first tensor whose indices do not increase from 0 to its count - 1, or -1.
    """
    width, value_bytes = format.width, format.value_bytes
    source_bytes = values.size // max(indices_K.size, 1)
    at = np.int64(0)
    for tensor in range(counts_T.size):
        first, last = offsets_E[tensor], offsets_E[tensor + 1]
        chosen_K, count = indices_K[first:last], counts_T[tensor]
        form, num_bytes, parameter = _shortest(chosen_K, count, format)
        if form < 0:
            return tensor
        target = out[at : at + num_bytes + STORE_BYTES]
        if form == INDEX32:
            for k in range(chosen_K.size):
                store64(target, 4 * k, np.uint64(chosen_K[k]))
        elif form == BITMAP:
            _write_bitmap(chosen_K, num_bytes, target)
        elif form == RICE:
            store64(target, 0, np.uint64(parameter << _COUNT_BITS | chosen_K.size))
            encode_gaps(chosen_K, parameter, target[_HEAD_BYTES:])
        elif form == ROWS:
            _write_rows(chosen_K, count // width, width, target)
        at += num_bytes
        source = values[source_bytes * first : source_bytes * last]
        end = at + value_bytes * (last - first)
        if source_bytes == value_bytes:
            _copy(source, out[at:])
        else:
            narrow(source.view(np.uint32), out[at:end].view(np.uint16))
        at = end
        forms_T2[tensor, 0], forms_T2[tensor, 1] = form, end
    return -1


@kernel
def _measure(data: Bytes, form: int, count: int, width: int, value_bytes: int) -> tuple[int, int]:
    """How many values a section holds and where they begin; -1 if it has another size."""
    start = np.int64(0)
    if form == INDEX32:
        start = data.size // (4 + value_bytes) * 4
    elif form == BITMAP:
        start = _filled((count + 7) // 8, value_bytes)
    elif form == RICE:
        if data.size < _HEAD_BYTES:
            return -1, 0
        number = np.int64(tail64(data, 0) & np.uint64(_MAX_RICE))
        start = data.size - number * value_bytes
        if start < _HEAD_BYTES:
            return -1, 0
    elif form == ROWS:
        rows = count // width
        if data.size < rows:
            return -1, 0
        for row in range(rows):
            start += np.int64(data[row])
        number = start
        start = _filled(rows + number, value_bytes)
        if data.size != start + number * value_bytes:
            return -1, 0
    number = (data.size - start) // value_bytes
    if start > data.size or number > count or start + number * value_bytes != data.size:
        return -1, 0
    return (-1 if form == DENSE and number != count else number), start


@kernel
def _read(
    data: Bytes, form: int, count: int, width: int, start: int, value_bytes: int, indices_K: Int32s
) -> bool:
    """Read as many indices as there is room for from a section whose values begin at `start`."""
    if form == DENSE:
        for k in range(indices_K.size):
            indices_K[k] = k
        return True
    if form == INDEX32:
        return _read_index32(data, count, indices_K)
    if form == BITMAP:
        return _read_bitmap(data[:start], count, indices_K)
    if form == ROWS:
        return _read_rows(data, count // width, width, indices_K)
    parameter = np.int64(tail64(data, 0) & _WORD) >> _COUNT_BITS
    end = decode_gaps(data, _HEAD_BYTES, parameter, count, indices_K)
    return end >= 0 and _filled(end, value_bytes) == start


@kernel
def read_sections(
    data: ReadOnlyBytes,
    heads_T3: Int64s,
    width: int,
    value_bytes: int,
    target_bytes: int,
    offsets_E: Int64s,
    indices_K: Int32s,
    values: Bytes,
) -> int:
    """Read the elements of each tensor.

    Args:
        data: sections, one after the other, read-only.
        heads_T3: form of each section, elements of its tensor, bytes.
        width: of the matrices that all tensors are; there is no ROWS where it is 0.
        value_bytes: of a value.
        target_bytes: of a value in `values`: as many, or 4, of which a bfloat16 is the upper half.
        offsets_E: receives those of the indices.
        indices_K: receives indices in their tensors, increasing; has room for as many as there are
            values of this size in `data`.
        values: receives their values; has room for as many.

    Returns:
        -1, or twice the first tensor that cannot be read, plus SIZE or CONTENT.
    """
    first, at = np.int64(0), np.int64(0)
    offsets_E[0] = 0
    for tensor in range(heads_T3.shape[0]):
        form, count, num_bytes = heads_T3[tensor, 0], heads_T3[tensor, 1], heads_T3[tensor, 2]
        section = data[first : first + num_bytes]
        number, start = _measure(section, form, count, width, value_bytes)
        if number < 0:
            return 2 * tensor + SIZE
        chosen_K = indices_K[at : at + number]
        if not _read(section, form, count, width, start, value_bytes, chosen_K):
            return 2 * tensor + CONTENT
        target = values[target_bytes * at : target_bytes * (at + number)]
        if target_bytes == value_bytes:
            _copy(section[start:], target)
        else:
            widen(section[start:], target)
        first += num_bytes
        at += number
        offsets_E[tensor + 1] = at
    return -1
