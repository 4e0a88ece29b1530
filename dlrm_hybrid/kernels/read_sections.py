"""Sections of several tensors back into elements; `kernels.write_sections` says how they are made.

Any bytes are safe to read. What lies in one section is never taken for a part of another.

Shapes: K elements of all T tensors, which lie between E = T + 1 places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import load64, store64, trailing_zeros
from dlrm_hybrid.kernels.jit import ReadOnlyBytes, kernel

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

SIZE, CONTENT = 0, 1  # what is wrong with a section

_WHOLE, _INDEX32, _BITMAP, _RICE, _ROWS = range(1, 6)
_HEAD_BYTES = 4
_COUNT_BITS = 27
_MOST_ONES = 24
_ESCAPE_BITS = _MOST_ONES + 32
_STOP = np.uint64(1 << _MOST_ONES)
_GAP = np.uint64(0xFFFFFFFF)
_ONE = np.uint64(1)
_HALF, _FIRST, _SECOND = np.uint64(16), np.uint64(0xFFFF), np.uint64(0xFFFF0000)


@kernel
def _tail(data: Bytes, at: int) -> np.uint64:
    """As `load64`, with zeros for bytes behind the end."""
    word = np.uint64(0)
    for byte in range(at, min(at + 8, data.size)):
        word |= np.uint64(data[byte]) << np.uint64(8 * (byte - at))
    return word


@kernel
def _filled(num_bytes: int, value_bytes: int) -> int:
    return (num_bytes + value_bytes - 1) // value_bytes * value_bytes


@kernel
def _measure(data: Bytes, form: int, count: int, width: int, value_bytes: int) -> tuple[int, int]:
    """How many values a section holds and where they begin; -1 if it has another size."""
    start = np.int64(0)
    if form == _INDEX32:
        start = data.size // (4 + value_bytes) * 4
    elif form == _BITMAP:
        start = _filled((count + 7) // 8, value_bytes)
    elif form == _RICE:
        if data.size < _HEAD_BYTES:
            return -1, 0
        number = np.int64(_tail(data, 0) & np.uint64((1 << _COUNT_BITS) - 1))
        start = data.size - number * value_bytes
        if start < _HEAD_BYTES:
            return -1, 0
    elif form == _ROWS:
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
    return (-1 if form == _WHOLE and number != count else number), start


@kernel
def _read_whole(indices_K: Int32s) -> bool:
    for k in range(indices_K.size):
        indices_K[k] = k
    return True


@kernel
def _read_index32(data: Bytes, count: int, indices_K: Int32s) -> bool:
    good = True
    previous = np.int64(-1)
    for k in range(indices_K.size):
        index = np.int64(np.int32(_tail(data, 4 * k) & _GAP))
        good &= previous < index
        previous = index
        indices_K[k] = index
    return good and previous < count


@kernel
def _read_bitmap(data: Bytes, count: int, indices_K: Int32s) -> bool:
    """From `data`, which ends where the bitmap does."""
    found = 0
    for at in range(0, data.size, 8):
        word = load64(data, at) if at + 8 <= data.size else _tail(data, at)
        while word != np.uint64(0):
            index = (at << 3) + trailing_zeros(word)
            if found == indices_K.size or index >= count:
                return False
            indices_K[found] = index
            found += 1
            word &= word - _ONE
    return found == indices_K.size


@kernel
def decode(data: ReadOnlyBytes, first: int, parameter: int, count: int, indices_K: Int32s) -> int:
    """Read K Golomb-Rice codes that begin at byte `first`.

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
def _read(
    data: Bytes, form: int, count: int, width: int, start: int, value_bytes: int, indices_K: Int32s
) -> bool:
    """Read as many indices as there is room for from a section whose values begin at `start`."""
    if form == _WHOLE:
        return _read_whole(indices_K)
    if form == _INDEX32:
        return _read_index32(data, count, indices_K)
    if form == _BITMAP:
        return _read_bitmap(data[:start], count, indices_K)
    if form == _ROWS:
        return _read_rows(data, count // width, width, indices_K)
    parameter = np.int64(_tail(data, 0) & _GAP) >> _COUNT_BITS
    end = decode(data, _HEAD_BYTES, parameter, count, indices_K)
    return end >= 0 and _filled(end, value_bytes) == start


@kernel
def _copy(data: Bytes, out: Bytes) -> None:
    """All bytes of `data` to the beginning of `out`."""
    words = data.size // 8
    for word in range(words):
        store64(out, 8 * word, load64(data, 8 * word))
    for byte in range(8 * words, data.size):
        out[byte] = data[byte]


@kernel
def _copy_to_upper_halves(data: Bytes, words: Bytes) -> None:
    """Two bytes to the upper half of every word of four, zeros to the lower one."""
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
def read_sections(
    data: ReadOnlyBytes,
    heads_T3: Int64s,
    width: int,
    value_bytes: int,
    taken_bytes: int,
    bounds_E: Int64s,
    indices_K: Int32s,
    values: Bytes,
) -> int:
    """Read the elements of each tensor.

    Args:
        data: sections one behind the other, read-only.
        heads_T3: form of each section, elements of its tensor, bytes.
        width: of the matrices that all tensors are; there is no ROWS where it is 0.
        value_bytes: of a value.
        taken_bytes: of a value in `values`: as many, or 4, of which a bfloat16 is the upper half.
        bounds_E: receives where the elements of each begin, and the end of the last.
        indices_K: receives positions in their tensors, rising; has room for as many as there are
            values of this size in `data`.
        values: receives their values; has room for as many.

    Returns:
        -1, or twice the first tensor that cannot be read, plus SIZE or CONTENT.
    """
    first, at = np.int64(0), np.int64(0)
    bounds_E[0] = 0
    for tensor in range(heads_T3.shape[0]):
        form, count, num_bytes = heads_T3[tensor, 0], heads_T3[tensor, 1], heads_T3[tensor, 2]
        own = data[first : first + num_bytes]
        number, start = _measure(own, form, count, width, value_bytes)
        if number < 0:
            return 2 * tensor + SIZE
        chosen_K = indices_K[at : at + number]
        if not _read(own, form, count, width, start, value_bytes, chosen_K):
            return 2 * tensor + CONTENT
        taken = values[taken_bytes * at : taken_bytes * (at + number)]
        if taken_bytes == value_bytes:
            _copy(own[start:], taken)
        else:
            _copy_to_upper_halves(own[start:], taken)
        first += num_bytes
        at += number
        bounds_E[tensor + 1] = at
    return -1
