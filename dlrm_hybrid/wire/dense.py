"""All elements of a tensor as a section, and back; values of float32, bfloat16 or float16.

Shapes: K values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.arrays import Bytes, Float32s
from dlrm_hybrid.kernels.scatter import round_bfloat16
from dlrm_hybrid.kernels.sections import narrow as narrow_bfloat16
from dlrm_hybrid.kernels.sections import widen
from dlrm_hybrid.wire.section import ELEMENT_BYTES, FLOATS, Dtype, Encoding, Section, SectionError

_LARGEST_FLOAT16 = np.float16(65504)
_NUMPY: dict[Dtype, np.dtype[Any]] = {
    Dtype.FLOAT32: np.dtype("<f4"),
    Dtype.FLOAT64: np.dtype("<f8"),
    Dtype.FLOAT16: np.dtype("<f2"),
    Dtype.INT32: np.dtype("<i4"),
    Dtype.INT64: np.dtype("<i8"),
    Dtype.UINT8: np.dtype("u1"),
}
_DTYPES = {dtype: name for name, dtype in _NUMPY.items()}


def dense(tensor: int, array: NDArray[Any]) -> Section:
    """A section with every element of `array` in C order; it views the array where it can.

    Args:
        tensor: number of the tensor.
        array: any shape; float64, float32, float16, int64, int32 or uint8.

    Raises:
        ValueError: another element type.
    """
    if array.dtype not in _DTYPES:
        raise ValueError(f"tensor {tensor}: no section holds elements of {array.dtype}")
    flat = np.ascontiguousarray(array).reshape(-1)
    payload = flat.view(np.uint8).data
    return Section(tensor, Encoding.DENSE, _DTYPES[array.dtype], flat.size, payload)


def array_of(section: Section) -> NDArray[Any]:
    """The elements of a dense section, one dimension, a view of its payload.

    Raises:
        ValueError: it is not dense, or numpy has no such element type.
    """
    if section.encoding is not Encoding.DENSE:
        raise ValueError(f"tensor {section.tensor}: {section.encoding.name} is not dense")
    if section.dtype not in _NUMPY:
        raise ValueError(f"tensor {section.tensor}: numpy has no type for {section.dtype.name}")
    return np.frombuffer(section.payload, _NUMPY[section.dtype])


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
    if dtype is Dtype.FLOAT16:
        return _float16(values_K).astype(np.float32)
    out_K = np.empty_like(values_K)
    round_bfloat16(values_K.view(np.uint32), out_K.view(np.uint32))
    return out_K


def pack(values_K: Float32s, dtype: Dtype) -> Bytes:
    """The bytes of values, rounded as `narrow` does; a view of them for FLOAT32."""
    if dtype is Dtype.FLOAT32:
        return values_K.view(np.uint8)
    if dtype is Dtype.FLOAT16:
        return _float16(values_K).view(np.uint8)
    halves_K = np.empty(values_K.size, np.uint16)
    narrow_bfloat16(values_K.view(np.uint32), halves_K)
    return halves_K.view(np.uint8)


def unpack(payload: Bytes, dtype: Dtype) -> Float32s:
    """The values whose bytes `pack` gives, in memory of their own."""
    if dtype is Dtype.FLOAT32:
        return payload.view(np.float32).copy()
    if dtype is Dtype.FLOAT16:
        return payload.view(np.float16).astype(np.float32)
    values_K = np.empty(payload.size // 2, np.float32)
    widen(payload, values_K.view(np.uint8))
    return values_K


def packed(tensor: int, values_K: Float32s, dtype: Dtype) -> Section:
    """A dense section of K values, rounded as `narrow` does; FLOAT32 is a view of them."""
    return Section(tensor, Encoding.DENSE, dtype, values_K.size, pack(values_K, dtype).data)


def values_of(section: Section) -> Float32s:
    """Read the values of a dense section into memory of their own; raises as `payload_of`."""
    return unpack(payload_of(section), section.dtype)


def payload_of(section: Section) -> Bytes:
    """The bytes of the values of a dense section, a read-only view for kernels.

    Raises:
        SectionError: it is not dense, holds no floats, or has another size than it says.
    """
    if section.encoding is not Encoding.DENSE or section.dtype not in FLOATS:
        reason = f"it holds {section.encoding.name} {section.dtype.name.lower()}"
        raise SectionError(section.tensor, Encoding.DENSE, reason)
    if len(section.payload) != section.count * ELEMENT_BYTES[section.dtype]:
        raise section.error(f"{section.count} values do not fill {len(section.payload)} bytes")
    return np.frombuffer(memoryview(section.payload).toreadonly(), np.uint8)


def _float16(values_K: Float32s) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves_K = values_K.astype(np.float16)
    beyond_K = np.isinf(halves_K) & np.isfinite(values_K)
    halves_K[beyond_K] = np.copysign(_LARGEST_FLOAT16, values_K[beyond_K])
    return halves_K
