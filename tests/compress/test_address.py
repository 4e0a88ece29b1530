"""Kernels get addresses of the CPU's memory only."""

import pytest
import torch

from dlrm_hybrid.compress.activation.received import scattered
from dlrm_hybrid.compress.address import address_of


def test_a_tensor_of_another_device_is_refused_by_its_name() -> None:
    with pytest.raises(ValueError, match="tensor on meta: kernels read the CPU's memory"):
        address_of(torch.empty(3, device="meta"))


def test_nothing_is_decoded_into_a_tensor_of_another_device() -> None:
    """As under a device context of the caller's: the address would be 0, or the device's."""
    indices = torch.zeros(1, dtype=torch.int32).numpy()
    with torch.device("meta"), pytest.raises(ValueError, match="tensor on meta"):
        scattered(indices, torch.ones(1, device="cpu").numpy(), torch.Size([4]))
