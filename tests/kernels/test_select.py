"""The fused pass against its definition, word by word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dlrm_hybrid.kernels.select import accumulate_select, select, select_all

Float32s = NDArray[np.float32]
FINITE = st.floats(-8, 8, width=32)
Case = tuple[Float32s, Float32s, float]
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
def cases(draw: st.DrawFn) -> Case:
    count = draw(st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200]))
    pair = draw(arrays(np.float32, (2, count), elements=FINITE))
    return pair[0], pair[1], draw(st.floats(0, 9, width=32))


@given(cases())
def test_selection_is_its_definition(case: Case) -> None:
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


def run_all(
    tensors: list[Case], held: list[bool]
) -> tuple[int, NDArray[np.int64], Float32s, NDArray[np.int32], Float32s]:
    """What `select_all` returns and writes; residuals of the tensors `held` hold the gradient."""
    pairs = list(zip(tensors, held, strict=True))
    sums = [one + gradient if hold else one for (gradient, one, _), hold in pairs]
    residual_N = np.concatenate(sums)
    gradients_T = [0 if hold else gradient.ctypes.data for (gradient, _, _), hold in pairs]
    firsts_E = np.cumsum([0, *(case[1].size for case in tensors)])
    bounds_E = np.zeros(len(tensors) + 1, np.int64)
    indices_N, values_N = np.zeros(residual_N.size, np.int32), np.zeros_like(residual_N)
    fault = select_all(
        np.array(gradients_T, np.uint64),
        np.array([tau for _, _, tau in tensors], np.float32),
        firsts_E,
        residual_N,
        bounds_E,
        indices_N,
        values_N,
    )
    return fault, bounds_E, residual_N, indices_N, values_N


@given(st.lists(st.tuples(cases(), st.booleans()), min_size=1, max_size=4))
def test_tensors_in_one_call_are_selected_as_one_by_one(drawn: list[tuple[Case, bool]]) -> None:
    tensors, held = [case for case, _ in drawn], [hold for _, hold in drawn]
    fault, bounds_E, residual_N, indices_K, values_K = run_all(tensors, held)
    single = [run(*case) for case in tensors]
    assert fault == -1
    assert np.diff(bounds_E).tolist() == [count for count, *_ in single]
    assert residual_N.tobytes() == b"".join(left_N.tobytes() for _, left_N, _, _ in single)
    end = bounds_E[-1]
    assert indices_K[:end].tobytes() == b"".join(one_K.tobytes() for *_, one_K, _ in single)
    assert values_K[:end].tobytes() == b"".join(one_K.tobytes() for *_, one_K in single)


@pytest.mark.parametrize("held", [True, False])
def test_the_first_tensor_that_is_not_finite_is_told(held: bool) -> None:
    tensors = [(np.ones(70, np.float32), np.ones(70, np.float32), 1.0) for _ in range(4)]
    tensors[2][0][3] = np.inf
    tensors[3][0][3] = np.nan
    assert run_all(tensors, [held] * 4)[0] == 2
