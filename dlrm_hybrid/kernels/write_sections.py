"""Some elements of several tensors as sections: their indices, then their values.

`wire.sparse` says how each form lies, `kernels.section_forms` chooses them, `kernels.read_sections`
reads them.

RICE codes gaps: how many elements lie between an index and the one before. The code with parameter
r is gap >> r ones, a zero, and the r low bits of the gap; where that takes 24 ones or more it is 24
ones and the gap in 32 bits. So no code is longer than 56 bits, and one window of 64 holds it
wherever it starts. Bits fill bytes from the lowest on. (S. W. Golomb, IEEE Trans. Inf. Theory 12,
1966; R. F. Rice, JPL 79-22, 1979.)

All tensors of a push are written in one call, for to call a kernel takes as long as to code a
hundred indices.

Shapes: K indices, of all T tensors in `write_sections`, where these lie between E = T + 1 places.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import load64, store64
from dlrm_hybrid.kernels.halves import nearest_bfloat16
from dlrm_hybrid.kernels.jit import kernel

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint16]

STORE_BYTES = 8  # the encoder writes so many at a time

_INDEX32, _BITMAP, _RICE, _ROWS = range(2, 6)
_HEAD_BYTES = 4
_COUNT_BITS = 27  # of the head; the parameter is above
_MOST_ONES = 24
_ESCAPE_BITS = _MOST_ONES + 32
_ONES = np.uint64((1 << _MOST_ONES) - 1)
_ONE = np.uint64(1)
_HALF_BITS = np.uint32(16)


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
def _write_bitmap(indices_K: Int32s, num_bytes: int, out: Bytes) -> None:
    k = 0
    for word in range((num_bytes + 7) // 8):
        bits = np.uint64(0)
        while k < indices_K.size and indices_K[k] >> 6 == word:
            bits |= _ONE << np.uint64(indices_K[k] & 63)
            k += 1
        store64(out, 8 * word, bits)


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
def _copy(data: Bytes, out: Bytes) -> None:
    """All bytes of `data` to the beginning of `out`."""
    words = data.size // 8
    for word in range(words):
        store64(out, 8 * word, load64(data, 8 * word))
    for byte in range(8 * words, data.size):
        out[byte] = data[byte]


@kernel
def _round(words: Words, halves: Halves) -> None:
    for k in range(words.size):
        halves[k] = nearest_bfloat16(words[k]) >> _HALF_BITS


@kernel
def write_sections(
    counts_T: Int64s,
    bounds_E: Int64s,
    width: int,
    indices_K: Int32s,
    values: Bytes,
    value_bytes: int,
    forms_T3: Int64s,
    out: Bytes,
) -> None:
    """Write the indices of each tensor and its values, one section behind the other.

    Args:
        counts_T: elements of each tensor.
        bounds_E: where the indices of each begin, and the end of the last.
        width: of the matrices that all tensors are, for ROWS.
        indices_K: positions in their tensors.
        values: K values of 2 or 4 bytes each.
        value_bytes: of a value when written: as many, or 2 of the nearest bfloat16.
        forms_T3: as `choose_forms` has found them.
        out: has room for the indices, the values, and STORE_BYTES.
    """
    given_bytes = values.size // max(indices_K.size, 1)
    at = np.int64(0)
    for tensor in range(counts_T.size):
        first, last = bounds_E[tensor], bounds_E[tensor + 1]
        chosen_K = indices_K[first:last]
        form, num_bytes, parameter = forms_T3[tensor, 0], forms_T3[tensor, 1], forms_T3[tensor, 2]
        own = out[at : at + num_bytes + STORE_BYTES]
        if form == _INDEX32:
            for k in range(chosen_K.size):
                store64(own, 4 * k, np.uint64(chosen_K[k]))
        elif form == _BITMAP:
            _write_bitmap(chosen_K, num_bytes, own)
        elif form == _RICE:
            store64(own, 0, np.uint64(parameter << _COUNT_BITS | chosen_K.size))
            encode(chosen_K, parameter, own[_HEAD_BYTES:])
        elif form == _ROWS:
            _write_rows(chosen_K, counts_T[tensor] // width, width, own)
        at += num_bytes
        given, end = (
            values[given_bytes * first : given_bytes * last],
            at + value_bytes * (last - first),
        )
        if given_bytes == value_bytes:
            _copy(given, out[at:])
        else:
            _round(given.view(np.uint32), out[at:end].view(np.uint16))
        at = end
