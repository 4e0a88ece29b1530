"""DCT-MP: what is kept, that one mask serves both ways, and what it costs in bytes."""

from itertools import product

import pytest
import torch
from activation_journey import KEY, gaussian, round_trip
from torch import Tensor

from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import Dtype

VALUE_BYTES = {Dtype.FLOAT32: 4, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 2}


def codec_of(
    sparsity: float, dtype: Dtype = Dtype.FLOAT32, allow_rice: bool = False
) -> ThresholdCodec:
    return ThresholdCodec(sparsity=sparsity, dtype=dtype, allow_rice=allow_rice)


def mask_of(x_BN: Tensor, keep: int) -> Tensor:
    """Algorithm 2 by sorting."""
    tau_B = x_BN.abs().sort(dim=1).values[:, x_BN.shape[1] - keep]
    return (x_BN.abs() >= tau_B[:, None]) & (x_BN != 0)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.int32)


@pytest.mark.parametrize(
    ("width", "counts"), [(256, [64, 26, 13, 6, 2]), (16, [4, 2, 1, 1, 1]), (1, [1, 1, 1, 1, 1])]
)
def test_as_many_are_kept_of_every_row_as_the_golden_vector_says(
    width: int, counts: list[int]
) -> None:
    x_BN = gaussian(7, width, 1)
    for sparsity, keep in zip((0.75, 0.9, 0.95, 0.98, 0.995), counts, strict=True):
        trip = round_trip(codec_of(sparsity), x_BN, x_BN)
        assert (trip.received_BN != 0).sum(dim=1).tolist() == [keep] * 7


@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize("shape", [(1, 1), (1, 20), (9, 1), (5, 70), (16, 256), (2, 300)])
def test_one_mask_both_ways(dtype: Dtype, shape: tuple[int, int]) -> None:
    zero = torch.zeros(())
    for case in product((False, True), ((0.0, 0), (0.75, 75), (0.9, 90)), (False, True)):
        rectified, (sparsity, parts), allow_rice = case
        x_BN, g_BN = gaussian(*shape, 2), gaussian(*shape, 3)
        x_BN = x_BN.relu() if rectified else x_BN
        rounded_BN = torch.from_numpy(narrow(x_BN.view(-1).numpy(), dtype)).view(shape)
        mask_BN = mask_of(x_BN, shape[1] - shape[1] * parts // 100)
        trip = round_trip(codec_of(sparsity, dtype, allow_rice), x_BN, g_BN)
        there_BN = torch.where(mask_BN, rounded_BN, zero)
        assert torch.equal(bits(trip.received_BN), bits(there_BN)), case
        rounded_g_BN = torch.from_numpy(narrow(g_BN.view(-1).numpy(), dtype)).view(shape)
        back_BN = torch.where(mask_BN, rounded_g_BN, zero)
        assert torch.equal(bits(trip.returned_BN), bits(back_BN)), case


def test_rows_of_zeros_stay_so_and_send_nothing() -> None:
    x_BN = torch.zeros(4, 64)
    x_BN[2, 5] = 3.0
    trip = round_trip(codec_of(0.75), x_BN, torch.ones(4, 64))
    assert torch.equal(trip.received_BN, x_BN)
    assert torch.equal(trip.returned_BN, (x_BN != 0).float())
    trip = round_trip(codec_of(0.75), torch.zeros(4, 64), torch.ones(4, 64))
    assert not trip.received_BN.any()
    assert not trip.returned_BN.any()
    assert trip.backward_bytes == 0


def test_the_largest_is_found_before_rounding_makes_it_like_others() -> None:
    x_BN = torch.tensor([[1.0, 1.001, 1.002, 0.5, 0.25, 0.125, 0.0, 0.0]])
    trip = round_trip(codec_of(0.875, Dtype.BFLOAT16), x_BN, torch.ones(1, 8))
    assert trip.received_BN.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0]]
    assert trip.returned_BN.tolist() == [[0, 0, 1, 0, 0, 0, 0, 0]]


@pytest.mark.parametrize("dtype", VALUE_BYTES)
@pytest.mark.parametrize(("sparsity", "keep"), [(0.75, 64), (0.9, 26), (0.95, 13), (0.98, 6)])
def test_bytes_are_those_of_the_formula(dtype: Dtype, sparsity: float, keep: int) -> None:
    rows, width = 128, 256
    # Without the sign, a permutation of integers below 256 has no ties in any type.
    x_BN = torch.stack(
        [torch.randperm(width, generator=torch.Generator().manual_seed(row)) for row in range(rows)]
    ).float()
    trip = round_trip(codec_of(sparsity, dtype), x_BN, x_BN)
    values = VALUE_BYTES[dtype] * rows * keep
    places = min(rows * keep + rows, rows * width // 8)  # a byte each and a count, or a bitmap
    assert trip.backward_bytes == values
    assert values + places <= trip.forward_bytes <= values + places + 8


def test_the_report_holds_the_mean_threshold() -> None:
    codec = codec_of(0.75)
    x_BN = torch.tensor([[4.0, -3.0, 2.0, 1.0], [8.0, 0.0, 0.0, -9.0]])
    codec.encode(x_BN, KEY)
    codec.encode(x_BN / 2, KEY)
    report = codec.report()
    assert report is not None
    assert (report.elements, report.sent, report.threshold) == (16, 4, (4 + 9) * 0.75 / 2)
