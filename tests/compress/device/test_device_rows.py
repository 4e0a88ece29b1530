"""The largest of rows on a device: those that the kernel of the CPU finds."""

import pytest
import torch
from torch import Tensor

from dlrm_hybrid.compress.device import rows
from dlrm_hybrid.kernels import magnitudes

EDGES = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-40, 1.5, -1.5, 1.5, 3e38, -2.0, 0.5, 1.5])


@pytest.mark.parametrize("k", [1, 2, 5, 12])
def test_a_device_finds_the_largest_of_rows(k: int) -> None:
    drawn = torch.Generator().manual_seed(k)
    normal = torch.randn(40, 12, generator=drawn)
    for x_BN in (normal, normal.relu(), normal.round(), EDGES.view(1, -1), torch.zeros(3, 12)):
        there, here = rows.largest_of_rows(x_BN, k), magnitudes.largest_of_rows(x_BN.numpy(), k)
        assert there is not None and here is not None
        for one, other in zip(there, here, strict=True):
            assert one.dtype == other.dtype and one.tobytes() == other.tobytes()
        values_K = rows.elements_at(x_BN, there.indices_K)
        assert values_K.tobytes() == here.values_K.tobytes()
    normal[3, 4] = torch.nan
    assert rows.largest_of_rows(normal, k) is None


def test_the_largest_of_rows_take_one_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []

    def zeros(tensors: list[Tensor]) -> list[Tensor]:
        waits.append(len(tensors))
        return [torch.zeros(one.shape, dtype=one.dtype) for one in tensors]

    monkeypatch.setattr(rows, "fetched", zeros)
    # A number of a meta tensor cannot be read, nor how many of its elements are not 0.
    assert rows.largest_of_rows(torch.empty(40, 12, device="meta"), 3) is None
    assert waits == [1]
