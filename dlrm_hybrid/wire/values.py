"""Values of float32, bfloat16 or float16: rounded, as bytes, and back.

Shapes: K values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.narrow import (
    bfloat16_bits,
    float16_bits,
    from_float16_bits,
    narrow_bfloat16,
    narrow_float16,
)
from dlrm_hybrid.wire.section import ELEMENT_BYTES, FLOATS, Dtype, Encoding, Section, SectionError

Float32s = NDArray[np.float32]

_SHIFT = np.uint32(16)


def narrow(values_K: Float32s, dtype: Dtype) -> Float32s:
    """Each value rounded to the nearest that `dtype` holds, ties to the even one.

    Finite values stay finite: what is beyond the largest number becomes the largest number.
    Infinity and NaN stay what they are. FLOAT32 gives back the same array.

    Args:
        values_K: float32, contiguous.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
    """
    if dtype is Dtype.FLOAT32:
        return values_K
    words_K = values_K.view(np.uint32)
    out_K = np.empty_like(values_K)
    if dtype is Dtype.BFLOAT16:
        narrow_bfloat16(words_K, out_K.view(np.uint32))
    else:
        narrow_float16(words_K, values_K, out_K.view(np.uint32), out_K)
    return out_K


def pack(values_K: Float32s, dtype: Dtype) -> NDArray[np.uint8]:
    """The bytes of values, rounded as `narrow` does; a view of them for FLOAT32.

    Args:
        values_K: float32, contiguous.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
    """
    if dtype is Dtype.FLOAT32:
        return values_K.view(np.uint8)
    halves_K = np.empty(values_K.size, np.uint16)
    if dtype is Dtype.BFLOAT16:
        bfloat16_bits(values_K.view(np.uint32), halves_K)
    else:
        rounded_K = narrow(values_K, dtype)
        float16_bits(rounded_K.view(np.uint32), rounded_K, halves_K)
    return halves_K.view(np.uint8)


def unpack(payload: bytes | memoryview | NDArray[Any], dtype: Dtype) -> Float32s:
    """The values whose bytes `pack` gives, in memory of their own.

    Args:
        payload: as many bytes as some number of values has, at any address.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
    """
    if dtype is Dtype.FLOAT32:
        return np.frombuffer(payload, np.float32).copy()
    halves_K = np.frombuffer(payload, np.uint16)
    if dtype is Dtype.BFLOAT16:
        return np.left_shift(halves_K, _SHIFT, dtype=np.uint32).view(np.float32)
    out_K = np.empty(halves_K.size, np.float32)
    # A copy is writable and aligned, whatever the frame was: one type for the kernel.
    from_float16_bits(halves_K.copy(), out_K.view(np.uint32), out_K)
    return out_K


def packed(tensor: int, values_K: Float32s, dtype: Dtype) -> Section:
    """A dense section of K values, rounded as `narrow` does; FLOAT32 is a view of them.

    Args:
        tensor: number of the tensor.
        values_K: float32, contiguous.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
    """
    return Section(tensor, Encoding.DENSE, dtype, values_K.size, pack(values_K, dtype).data)


def values_of(section: Section) -> Float32s:
    """The values of a dense section, in memory of their own; raises as `payload_of`."""
    return unpack(payload_of(section), section.dtype)


def payload_of(section: Section) -> NDArray[np.uint8]:
    """The bytes of the values of a dense section, a read-only view.

    Raises:
        SectionError: it is not dense, holds no floats, or has another size than it says.
    """
    if section.encoding is not Encoding.DENSE or section.dtype not in FLOATS:
        reason = f"it holds {section.encoding.name} {section.dtype.name.lower()}"
        raise SectionError(section.tensor, Encoding.DENSE, reason)
    if len(section.payload) != section.count * ELEMENT_BYTES[section.dtype]:
        reason = f"{section.count} values do not fill {len(section.payload)} bytes"
        raise SectionError(section.tensor, Encoding.DENSE, reason)
    return np.frombuffer(memoryview(section.payload).toreadonly(), np.uint8)
