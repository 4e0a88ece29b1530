"""Which elements a sparse section holds: the first part of its payload, in four encodings.

    INDEX32   K indices, i32 each
    BITMAP    bit i of byte b says whether element 8 b + i is there
    RICE      u32: K in the low 27 bits, the parameter above │ the gaps (kernels/rice.py)
    ROWS      of a matrix of B rows: how many of each, u8 each │ their K columns, u8 each

Each is filled up with zeros to a multiple of a value's size; the K values follow. Writing gives the
bytes of the part; reading gives the indices and the offset of the values.

Shapes: K elements of N, B rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.bitmap import list_bits, rising, set_bits
from dlrm_hybrid.kernels.rice import COUNT_BITS, HEAD_BYTES, STORE_BYTES, encode, fit
from dlrm_hybrid.kernels.rice_decode import decode
from dlrm_hybrid.kernels.row_positions import FULL, UNORDERED, join_rows, split_rows
from dlrm_hybrid.wire.section import ELEMENT_BYTES, Section, SectionError

Bytes = NDArray[np.uint8]
Int32s = NDArray[np.int32]
Part = tuple[Int32s, int]

MAX_COLUMNS = 256


def padded(num_bytes: int, value_bytes: int) -> int:
    """`num_bytes` and what fills them up to a multiple of a value's size."""
    return num_bytes + -num_bytes % value_bytes


def index32_of(indices_K: Int32s, count: int) -> Bytes:
    """INDEX32, a view of the indices.

    Raises:
        ValueError: the indices do not rise inside the tensor.
    """
    if not rising(indices_K, count):
        raise unordered(count)
    return indices_K.view(np.uint8)


def bitmap_of(indices_K: Int32s, count: int, num_bytes: int) -> Bytes:
    """BITMAP of `num_bytes`.

    Raises:
        ValueError: the indices do not rise inside the tensor.
    """
    words_W = np.empty(-(-num_bytes // 8), np.uint64)
    if not set_bits(indices_K, count, words_W):
        raise unordered(count)
    return words_W.view(np.uint8)[:num_bytes]


def rice_size(indices_K: Int32s, count: int) -> tuple[int, int]:
    """The best parameter, and the bytes of RICE before it is filled up; there is an index.

    Raises:
        ValueError: the indices do not rise inside the tensor.
    """
    parameter, bits = fit(indices_K, count)
    if bits < 0:
        raise unordered(count)
    return parameter, HEAD_BYTES + (bits + 7) // 8


def rice_of(indices_K: Int32s, parameter: int, num_bytes: int) -> Bytes:
    """RICE of `num_bytes`, filled up, with the parameter that `rice_size` has found."""
    out = np.empty(num_bytes + STORE_BYTES, np.uint8)
    out[:HEAD_BYTES].view(np.uint32)[0] = parameter << COUNT_BITS | indices_K.size
    encode(indices_K, parameter, out[HEAD_BYTES:])
    return out[:num_bytes]


def rows_of(indices_K: Int32s, count: int, width: int, num_bytes: int) -> Bytes | None:
    """ROWS of `num_bytes`; None if a row has 256 elements.

    Raises:
        ValueError: the indices do not rise inside the tensor.
    """
    num_rows = count // width
    out = np.zeros(num_bytes, np.uint8)
    end = num_rows + indices_K.size
    fault = split_rows(indices_K, width, out[:num_rows], out[num_rows:end])
    if fault == UNORDERED:
        raise unordered(count)
    return None if fault == FULL else out


def error(section: Section, reason: str) -> SectionError:
    """What is wrong with the section."""
    return SectionError(section.tensor, section.encoding, reason)


def unordered(count: int) -> ValueError:
    """What `sparse` raises for indices of a tensor of `count` elements."""
    return ValueError(f"indices do not rise from 0 to {count - 1}")


def read_index32(section: Section) -> Part:
    """Indices and offset of the values.

    Raises:
        SectionError: no choice of elements has this payload.
    """
    num_values, rest = divmod(len(section.payload), 4 + ELEMENT_BYTES[section.dtype])
    if rest or num_values > section.count:
        raise _misfit(section)
    indices_K = np.frombuffer(section.payload, np.int32, num_values).copy()
    if not rising(indices_K, section.count):
        raise error(section, f"indices do not rise from 0 to {section.count - 1}")
    return indices_K, 4 * num_values


def read_bitmap(section: Section) -> Part:
    """Indices and offset of the values.

    Raises:
        SectionError: no choice of elements has this payload.
    """
    value_bytes = ELEMENT_BYTES[section.dtype]
    num_bytes = padded((section.count + 7) // 8, value_bytes)
    num_values, rest = divmod(len(section.payload) - num_bytes, value_bytes)
    if rest or not 0 <= num_values <= section.count:
        raise _misfit(section)
    words_W = np.zeros(-(-num_bytes // 8), np.uint64)
    words_W.view(np.uint8)[:num_bytes] = np.frombuffer(section.payload, np.uint8, num_bytes)
    indices_K = np.empty(num_values, np.int32)
    if not list_bits(words_W, section.count, indices_K):
        raise error(section, f"the bitmap does not choose {num_values} of {section.count}")
    return indices_K, num_bytes


def read_rice(section: Section) -> Part:
    """Indices and offset of the values.

    Raises:
        SectionError: no choice of elements has this payload.
    """
    value_bytes = ELEMENT_BYTES[section.dtype]
    if len(section.payload) < HEAD_BYTES:
        raise _misfit(section)
    head = int.from_bytes(section.payload[:HEAD_BYTES], "little")
    parameter, num_values = divmod(head, 1 << COUNT_BITS)
    start = len(section.payload) - num_values * value_bytes
    if num_values > section.count or start < HEAD_BYTES:
        raise _misfit(section)
    indices_K = np.empty(num_values, np.int32)
    data = _constant(section, len(section.payload))
    end = decode(data, HEAD_BYTES, parameter, section.count, indices_K)
    if end < 0 or padded(end, value_bytes) != start:
        raise error(section, f"the gaps are not those of {num_values} of {section.count}")
    return indices_K, start


def read_rows(section: Section, shape: tuple[int, int]) -> Part:
    """Flat indices and offset of the values.

    Raises:
        SectionError: no choice of elements has this payload.
    """
    value_bytes = ELEMENT_BYTES[section.dtype]
    num_rows, width = shape
    if len(section.payload) < num_rows or num_rows * width != section.count:
        raise _misfit(section)
    counts_B = _constant(section, num_rows)
    num_values = int(counts_B.sum())
    end = num_rows + num_values
    start = padded(end, value_bytes)
    if len(section.payload) != start + num_values * value_bytes:
        raise _misfit(section)
    indices_K = np.empty(num_values, np.int32)
    if not join_rows(counts_B, _constant(section, end)[num_rows:], width, indices_K):
        raise error(section, f"columns do not rise from 0 to {width - 1}")
    return indices_K, start


def _constant(section: Section, num_bytes: int) -> Bytes:
    """The first bytes of a payload, read-only whatever the frame was: one type for a kernel."""
    data = np.frombuffer(section.payload, np.uint8, num_bytes)
    data.flags.writeable = False
    return data


def _misfit(section: Section) -> SectionError:
    num_bytes = len(section.payload)
    return error(section, f"{num_bytes} bytes hold no choice of {section.count} elements")
