"""Tensors for kernels that take addresses, where a view as an array would cost more than they."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def address_of(tensor: Tensor) -> int:
    """Where a float32 tensor lies, element behind element; it must outlive the use.

    Raises:
        ValueError: its elements are of another type, not contiguous, or not in the CPU's memory.
    """
    if tensor.device.type != "cpu":  # the address means nothing to a kernel, or something else
        raise ValueError(f"tensor on {tensor.device}: kernels read the CPU's memory, use .cpu()")
    if tensor.dtype is not torch.float32 or not tensor.is_contiguous():
        raise ValueError(f"{tensor.dtype} {list(tensor.shape)} is not float32 in a row")
    return tensor.data_ptr()


def addresses_of(arrays: Sequence[NDArray[np.float32]]) -> NDArray[np.uint64]:
    """Where contiguous arrays begin, for a kernel; they must outlive its call."""
    addresses = [array.__array_interface__["data"][0] for array in arrays]
    return np.array(addresses, np.uint64)
