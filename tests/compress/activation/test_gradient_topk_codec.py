"""Top-k of gradients with feedback, against its definition."""

import pytest
import torch
from activation_journey import KEY, gaussian, round_trip
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import Key
from dlrm_hybrid.compress.activation.controls import GradientTopKCodec
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.section import Dtype

ROWS, WIDTH = 4, 10
KEEP = 10  # of 40, at sparsity 0.75
RESIDUAL = "microbatch.2.residual"


def codec_of(sparsity: float = 0.75, dtype: Dtype = Dtype.FLOAT32) -> GradientTopKCodec:
    return GradientTopKCodec(sparsity=sparsity, dtype=dtype, shape=(ROWS, WIDTH), microbatches=3)


def top(sum_BN: Tensor, keep: int) -> Tensor:
    """Sorting by size, then by place."""
    sum_N = sum_BN.reshape(-1)
    order = sorted(range(sum_N.numel()), key=lambda place: (-abs(float(sum_N[place])), place))
    kept_N = torch.zeros_like(sum_N)
    kept_N[order[:keep]] = sum_N[order[:keep]]
    return kept_N.reshape(sum_BN.shape)


@given(
    st.lists(
        arrays("float32", (ROWS, WIDTH), elements=st.integers(-4, 4).map(lambda n: n / 4)),
        min_size=1,
        max_size=4,
    )
)
def test_the_first_of_the_largest_leave_and_the_rest_stays(gradients: list[object]) -> None:
    codec = codec_of()
    residual_BN = torch.zeros(ROWS, WIDTH)
    for gradient in gradients:
        g_BN = torch.as_tensor(gradient)
        returned_BN = round_trip(codec, g_BN, g_BN).returned_BN
        assert torch.equal(returned_BN, top(g_BN + residual_BN, KEEP))
        residual_BN = g_BN + residual_BN - returned_BN
        assert torch.equal(codec.tensors()[RESIDUAL], residual_BN)


def test_what_rounding_loses_stays_in_the_residual() -> None:
    codec = codec_of(dtype=Dtype.BFLOAT16)
    g_BN = gaussian(ROWS, WIDTH, 1)
    returned_BN = round_trip(codec, g_BN, g_BN).returned_BN
    kept_BN = top(g_BN, KEEP)
    assert torch.equal(returned_BN, kept_BN.bfloat16().float())
    assert not torch.equal(returned_BN, kept_BN)
    assert torch.equal(codec.tensors()[RESIDUAL], g_BN - returned_BN)


def test_activations_cross_whole() -> None:
    x_BN = gaussian(ROWS, WIDTH, 2)
    trip = round_trip(codec_of(), x_BN, x_BN)
    assert torch.equal(trip.received_BN, x_BN)
    assert trip.forward_bytes == 4 * ROWS * WIDTH
    assert trip.backward_bytes < 4 * ROWS * WIDTH


def test_a_smaller_batch_uses_the_first_rows() -> None:
    codec = codec_of()
    g_BN = gaussian(ROWS, WIDTH, 3)
    round_trip(codec, g_BN, g_BN)
    before_BN = codec.tensors()[RESIDUAL].clone()
    few_BN = gaussian(2, WIDTH, 4)
    returned_BN = round_trip(codec, few_BN, few_BN).returned_BN
    assert torch.equal(returned_BN, top(few_BN + before_BN[:2], 5))
    after_BN = codec.tensors()[RESIDUAL]
    assert torch.equal(after_BN[2:], before_BN[2:])
    assert torch.equal(after_BN[:2], few_BN + before_BN[:2] - returned_BN)


def test_every_microbatch_has_its_own_residual() -> None:
    codec = codec_of()
    g_BN = gaussian(ROWS, WIDTH, 5)
    round_trip(codec, g_BN, g_BN, Key(7, 1, 0))
    tensors = codec.tensors()
    assert list(tensors) == [f"microbatch.{number}.residual" for number in range(3)]
    assert [bool(tensor.any()) for tensor in tensors.values()] == [True, False, False]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_leaves_the_residual_alone(bad: float) -> None:
    codec = codec_of()
    g_BN = gaussian(ROWS, WIDTH, 6)
    round_trip(codec, g_BN, g_BN)
    before_BN = codec.tensors()[RESIDUAL].clone()
    bad_BN = g_BN.clone()
    bad_BN[2, 3] = bad
    with pytest.raises(DivergedError, match="batch 7, boundary 1, micro-batch 2: a gradient"):
        codec.encode_gradient(bad_BN, None, KEY)
    assert torch.equal(codec.tensors()[RESIDUAL], before_BN)
