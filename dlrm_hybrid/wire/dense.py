"""Whole tensors as sections of a frame, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.wire.section import Dtype, Encoding, Section

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
