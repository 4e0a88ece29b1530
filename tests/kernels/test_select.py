"""The fused pass against its definition, word by word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dlrm_hybrid.kernels.select import accumulate_select, select

Float32s = NDArray[np.float32]
FINITE = st.floats(-8, 8, width=32)
SUBNORMAL = np.float32(1e-45)


def run(
    gradient_N: Float32s | None, residual_N: Float32s, tau: float
) -> tuple[int, Float32s, NDArray[np.int32], Float32s]:
    """Count, new residual, indices and values; without a gradient `select`."""
    left_N = residual_N.copy()
    indices_N = np.full(left_N.size, -7, np.int32)
    values_N = np.full(left_N.size, -7, np.float32)
    if gradient_N is None:
        count = select(left_N, tau, indices_N, values_N)
    else:
        count = accumulate_select(gradient_N, left_N, tau, indices_N, values_N)
    return count, left_N, indices_N[: max(count, 0)], values_N[: max(count, 0)]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Float32s, Float32s, float]:
    count = draw(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200]))
    pair = draw(arrays(np.float32, (2, count), elements=FINITE))
    return pair[0], pair[1], draw(st.floats(0, 9, width=32))


@given(cases())
def test_selection_is_its_definition(case: tuple[Float32s, Float32s, float]) -> None:
    gradient_N, residual_N, tau = case
    sum_N = residual_N + gradient_N
    leaves_N = (np.abs(sum_N) >= np.float32(tau)) & (sum_N != 0)
    for count, left_N, indices_K, values_K in (
        run(gradient_N, residual_N, tau),
        run(None, sum_N, tau),
    ):
        assert count == leaves_N.sum()
        np.testing.assert_array_equal(indices_K, np.flatnonzero(leaves_N))
        assert values_K.tobytes() == sum_N[leaves_N].tobytes()
        assert left_N.tobytes() == np.where(leaves_N, np.float32(0), sum_N).tobytes()


@pytest.mark.parametrize("with_gradient", [True, False])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 63, 64, 129])
@pytest.mark.parametrize("tau", [0.0, 1.0, np.inf])
def test_a_value_that_is_not_finite_is_seen(
    with_gradient: bool, bad: float, position: int, tau: float
) -> None:
    values_N = np.ones(130, np.float32)
    assert run(values_N if with_gradient else None, values_N, tau)[0] >= 0
    values_N[position] = bad
    assert run(np.ones(130, np.float32) if with_gradient else None, values_N, tau)[0] == -1


@pytest.mark.parametrize("position", [5, 64])
def test_a_sum_that_overflows_is_seen(position: int) -> None:
    residual_N, gradient_N = np.zeros((2, 65), np.float32)
    residual_N[position] = gradient_N[position] = 3e38
    assert run(gradient_N, residual_N, 1.0)[0] == -1


def test_zeros_of_either_sign_stay_and_the_smallest_number_leaves() -> None:
    residual_N = np.zeros(70, np.float32)
    residual_N[[3, 66]] = -0.0
    assert run(None, residual_N, 0.0)[0] == 0
    residual_N[[4, 67]] = SUBNORMAL, -SUBNORMAL
    count, left_N, indices_K, values_K = run(None, residual_N, 0.0)
    assert (count, indices_K.tolist()) == (2, [4, 67])
    assert values_K.tolist() == [SUBNORMAL, -SUBNORMAL]
    assert not left_N.any()


def test_an_infinite_threshold_keeps_everything() -> None:
    residual_N = np.full(100, np.finfo(np.float32).max)
    count, left_N, _, _ = run(np.zeros(100, np.float32), residual_N, np.inf)
    assert count == 0
    assert left_N.tobytes() == residual_N.tobytes()
