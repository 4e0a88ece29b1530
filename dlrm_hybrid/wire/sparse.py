"""Some elements of a tensor as a section, in the encoding that takes the fewest bytes.

    INDEX32   K indices i32 │ K values
    BITMAP    ceil(N / 8) bytes, bit i of byte b is element 8 b + i │ 0 to a value's size │ K values

N is the section's count, values have the section's type, K follows from the length. Indices rise,
so every choice of elements has one form. DENSE stands for all N elements, never for fewer: what a
section means does not hang on how it was encoded.

Any payload gives indices that rise from 0 to N - 1 and as many values, or a `SectionError`; memory
is taken only for what the payload's length allows.

Shapes: K elements of N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.bitmap import list_bits, rising, set_bits
from dlrm_hybrid.wire.section import ELEMENT_BYTES, FLOATS, Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.values import Float32s, packed, unpack, values_of, write

Int32s = NDArray[np.int32]

MAX_COUNT = 2**31 - 1


@final
@dataclass(frozen=True, slots=True)
class Sparse:
    """What a section holds, in memory of its own.

    Attributes:
        indices_K: int32, rising.
        values_K: float32.
        whole: the section was dense, so `indices_K` counts from 0 to N - 1.
    """

    indices_K: Int32s
    values_K: Float32s
    whole: bool


def sparse(tensor: int, count: int, indices_K: Int32s, values_K: Float32s, dtype: Dtype) -> Section:
    """The smallest section of these elements; one that holds all views its values for FLOAT32.

    Args:
        tensor: number of the tensor.
        count: its elements N, below 2**31.
        indices_K: int32, contiguous, rising from 0 to N - 1.
        values_K: float32, contiguous, already rounded by `wire.values.narrow`.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.

    Raises:
        ValueError: the indices do not rise or are out of range, as far as the encoding looks.
    """
    if indices_K.size == count:
        return packed(tensor, values_K, dtype)
    if _bitmap_bytes(count, dtype) < 4 * indices_K.size:
        return _bitmap(tensor, count, indices_K, values_K, dtype)
    return _index32(tensor, count, indices_K, values_K, dtype)


def sparse_of(section: Section) -> Sparse:
    """The elements of a section that `sparse` made, or of a dense one.

    Raises:
        SectionError: no such section has this payload.
    """
    if section.encoding is Encoding.DENSE:
        values_K = values_of(section)
        return Sparse(np.arange(values_K.size, dtype=np.int32), values_K, True)
    if section.dtype not in FLOATS or section.count > MAX_COUNT:
        raise _error(section, f"{section.count} elements of {section.dtype.name.lower()}")
    if section.encoding is Encoding.INDEX32:
        return _index32_of(section)
    if section.encoding is Encoding.BITMAP:
        return _bitmap_of(section)
    raise _error(section, "this encoding is read elsewhere")


def _error(section: Section, reason: str) -> SectionError:
    return SectionError(section.tensor, section.encoding, reason)


def _unordered(tensor: int, count: int) -> ValueError:
    return ValueError(f"tensor {tensor}: indices do not rise from 0 to {count - 1}")


def _index32(
    tensor: int, count: int, indices_K: Int32s, values_K: Float32s, dtype: Dtype
) -> Section:
    num_values = indices_K.size
    payload = np.empty(num_values * (4 + ELEMENT_BYTES[dtype]), np.uint8)
    payload[: 4 * num_values].view(np.int32)[:] = indices_K
    write(values_K, dtype, payload[4 * num_values :])
    return Section(tensor, Encoding.INDEX32, dtype, count, payload.data)


def _index32_of(section: Section) -> Sparse:
    num_values, rest = divmod(len(section.payload), 4 + ELEMENT_BYTES[section.dtype])
    if rest or num_values > section.count:
        raise _error(section, f"{len(section.payload)} bytes hold no {section.count} elements")
    payload = memoryview(section.payload)
    indices_K = np.frombuffer(payload[: 4 * num_values], np.int32).copy()
    if not rising(indices_K, section.count):
        raise _error(section, f"indices do not rise from 0 to {section.count - 1}")
    return Sparse(indices_K, unpack(payload[4 * num_values :], section.dtype), False)


def _bitmap_bytes(count: int, dtype: Dtype) -> int:
    value_bytes = ELEMENT_BYTES[dtype]
    return -(-count // (8 * value_bytes)) * value_bytes


def _bitmap(
    tensor: int, count: int, indices_K: Int32s, values_K: Float32s, dtype: Dtype
) -> Section:
    words_W = np.empty((count + 63) // 64, np.uint64)
    if not set_bits(indices_K, count, words_W):
        raise _unordered(tensor, count)
    num_bytes = _bitmap_bytes(count, dtype)
    payload = np.empty(num_bytes + values_K.size * ELEMENT_BYTES[dtype], np.uint8)
    payload[:num_bytes] = words_W.view(np.uint8)[:num_bytes]
    write(values_K, dtype, payload[num_bytes:])
    return Section(tensor, Encoding.BITMAP, dtype, count, payload.data)


def _bitmap_of(section: Section) -> Sparse:
    num_bytes = _bitmap_bytes(section.count, section.dtype)
    num_values, rest = divmod(len(section.payload) - num_bytes, ELEMENT_BYTES[section.dtype])
    if num_values < 0 or rest or num_values > section.count:
        raise _error(section, f"{len(section.payload)} bytes hold no {section.count} elements")
    payload = memoryview(section.payload)
    words_W = np.zeros((section.count + 63) // 64, np.uint64)
    words_W.view(np.uint8)[:num_bytes] = np.frombuffer(payload[:num_bytes], np.uint8)
    indices_K = np.empty(num_values, np.int32)
    if not list_bits(words_W, section.count, indices_K):
        raise _error(section, f"the bitmap does not choose {num_values} of {section.count}")
    return Sparse(indices_K, unpack(payload[num_bytes:], section.dtype), False)
