"""What computes on the CPU names every tensor of another device that it is given."""

import pytest
import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import scattered
from dlrm_hybrid.compress.host import host_array


@pytest.mark.parametrize(
    ("tensor", "reason"),
    [
        (torch.empty(3, device="meta"), r"bias is on meta, .*: pass its .cpu\(\)"),
        (torch.empty(3, dtype=torch.float64), r"bias: torch.float64 \[3\] is not"),
        (torch.empty(3, 2).T, r"bias: torch.float32 \[2, 3\] is not contiguous float32"),
    ],
)
def test_what_kernels_cannot_read_is_refused_by_name(tensor: Tensor, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        host_array(tensor, "gradient", "bias")


def test_nothing_is_decoded_into_a_tensor_of_another_device() -> None:
    """As under a device context of the caller's."""
    indices = torch.zeros(1, dtype=torch.int32).numpy()
    with torch.device("meta"), pytest.raises(ValueError, match="received activation is on meta"):
        scattered(indices, torch.ones(1, device="cpu").numpy(), torch.Size([4]))
