"""The kernels against plain torch, and both against what their definitions say of rare values."""

from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import plain_torch
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.kernels import magnitudes, residual
from dlrm_hybrid.kernels import ternary as ternary_kernels
from dlrm_hybrid.kernels.magnitudes import SAMPLED_FROM, STRIDE

Float32s = NDArray[np.float32]

KERNELS = SimpleNamespace(**vars(magnitudes), accumulate_select=residual.accumulate_select)
BOTH = pytest.mark.parametrize("found_by", [KERNELS, plain_torch], ids=["numba", "torch"])
NOT_FINITE = (np.nan, -np.nan, np.inf, -np.inf)
SUBNORMAL, LARGEST = np.float32(1e-45), np.finfo(np.float32).max
SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, SUBNORMAL, -SUBNORMAL])
ELEMENTS = st.floats(-8, 8, width=32) | SPECIAL
NEAR = st.integers(0x3F800000, 0x3F800004).map(lambda bits: np.uint32(bits).view(np.float32))
COUNTS = st.sampled_from([0, 1, 2, 63, 64, 65, 128, 200])
RNG = np.random.default_rng(5)
DRAWS = {
    "normal": lambda count: RNG.standard_normal(count),
    "laplace": lambda count: RNG.laplace(size=count),
    "gamma": lambda count: RNG.gamma(0.5, size=count) * RNG.choice([-1, 1], count),
    "student": lambda count: RNG.standard_t(3, count),
}


def selected(
    found_by: Any, gradients: list[Tensor | None], residuals: list[Float32s], taus: list[float]
) -> tuple[int, list[int], bytes, bytes, bytes]:
    """Fault, counts, residual, indices and values."""
    offsets = np.cumsum([0, *(one.size for one in residuals)])
    residual_N = np.concatenate(residuals)
    splits_E, local_N = np.zeros(len(taus) + 1, np.int64), np.zeros(residual_N.size, np.int32)
    values_N, taus_T = np.zeros_like(residual_N), np.array(taus, np.float32)
    addresses = [0 if one is None else one.data_ptr() for one in gradients]
    fault = found_by.accumulate_select(
        *(np.array(addresses, np.uint64), taus_T, offsets, residual_N),
        *(splits_E, local_N, values_N),
    )
    if fault >= 0:
        return fault, [], b"", b"", b""
    found = local_N[: splits_E[-1]].tobytes(), values_N[: splits_E[-1]].tobytes()
    return fault, np.diff(splits_E).tolist(), residual_N.tobytes(), *found


@st.composite
def tensors(draw: st.DrawFn) -> tuple[Tensor | None, Float32s, float]:
    pair = draw(arrays(np.float32, (2, draw(COUNTS)), elements=ELEMENTS))
    gradient = torch.from_numpy(pair[0]) if draw(st.booleans()) else None
    return gradient, pair[1], draw(st.floats(0, 9, width=32))


@given(st.lists(tensors(), min_size=1, max_size=4))
def test_the_same_elements_leave_the_residual(
    drawn: list[tuple[Tensor | None, Float32s, float]],
) -> None:
    gradients, residuals, taus = (list(column) for column in zip(*drawn, strict=True))
    kernels, plain = (
        selected(found_by, gradients, residuals, taus) for found_by in (KERNELS, plain_torch)
    )
    assert kernels == plain
    assert kernels[0] == -1


@BOTH
@pytest.mark.parametrize("with_gradient", [True, False])
def test_the_first_tensor_with_a_value_that_is_not_finite_is_named(
    found_by: Any, with_gradient: bool
) -> None:
    gradients = [torch.ones(130) if with_gradient else None] * 4
    for case in product(NOT_FINITE, (0, 63, 64, 129), (0.0, 1.0, np.inf)):
        bad, index, tau = case
        held = [np.ones(130, np.float32) for _ in range(4)]
        assert selected(found_by, gradients, held, [tau] * 4)[0] == -1, case
        held[2][index] = held[3][0] = bad
        assert selected(found_by, gradients, held, [tau] * 4)[0] == 2, case


@BOTH
@pytest.mark.parametrize("index", [5, 64])
def test_a_sum_that_overflows_is_seen(found_by: Any, index: int) -> None:
    residual_N = np.zeros(65, np.float32)
    residual_N[index] = 3e38
    assert selected(found_by, [torch.from_numpy(residual_N.copy())], [residual_N], [1.0])[0] == 0


@BOTH
def test_zeros_of_either_sign_stay_and_the_smallest_number_leaves(found_by: Any) -> None:
    residual_N = np.zeros(70, np.float32)
    residual_N[[3, 66]] = -0.0
    assert selected(found_by, [None], [residual_N], [0.0])[1] == [0]
    assert found_by.reaching(residual_N, 0.0).size == 0
    residual_N[[4, 67]] = SUBNORMAL, -SUBNORMAL
    _, counts, left, local_K, _ = selected(found_by, [None], [residual_N], [0.0])
    assert (counts, np.frombuffer(local_K, np.int32).tolist()) == ([2], [4, 67])
    assert not np.frombuffer(left, np.float32).any()
    assert found_by.reaching(residual_N, 0.0).tolist() == [4, 67]


@BOTH
def test_an_infinite_threshold_keeps_everything(found_by: Any) -> None:
    residual_N = np.full(100, LARGEST)
    _, counts, left, _, _ = selected(found_by, [torch.zeros(100)], [residual_N], [np.inf])
    assert counts == [0]
    assert left == residual_N.tobytes()


@given(arrays(np.float32, COUNTS, elements=st.floats(width=32) | SPECIAL), st.floats(0, 9))
def test_the_same_elements_reach_a_magnitude(values_N: Float32s, tau: float) -> None:
    assert (
        magnitudes.reaching(values_N, tau).tolist() == plain_torch.reaching(values_N, tau).tolist()
    )


@given(arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32)), st.data())
def test_any_magnitude_of_any_values(values_N: Float32s, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, values_N.size))
    np.testing.assert_equal(
        magnitudes.kth_magnitude(values_N, k), plain_torch.kth_magnitude(values_N, k)
    )


@pytest.mark.parametrize("name", DRAWS)
def test_large_tensors_are_sampled_first(name: str) -> None:
    for count, density in product((SAMPLED_FROM, 100_003), (1.0, 0.5, 0.1, 0.01, 0.001)):
        values_N = (DRAWS[name](count) * 1e-3).astype(np.float32)
        k = max(1, int(density * count))
        tau = magnitudes.kth_magnitude(values_N, k)
        assert tau == plain_torch.kth_magnitude(values_N, k), (count, density)
        assert k <= magnitudes.reaching(values_N, tau).size <= 1.05 * k + 1, (count, density)


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e3])
def test_a_sample_that_misleads_costs_only_time(scale: float) -> None:
    values_N = RNG.standard_normal(50_000).astype(np.float32)
    values_N[::STRIDE] *= np.float32(scale)
    assert magnitudes.kth_magnitude(values_N, 500) == plain_torch.kth_magnitude(values_N, 500)


@BOTH
@pytest.mark.parametrize("value", [0.0, -1.5])
def test_equal_magnitudes_rank_alike(found_by: Any, value: float) -> None:
    values_N = np.full(20_000, value, np.float32)
    assert found_by.kth_magnitude(values_N, 200) == abs(value)
    values_N[7] = 3
    assert found_by.kth_magnitude(values_N, 1) == 3
    assert found_by.kth_magnitude(values_N, 2) == abs(value)


@BOTH
def test_what_is_not_finite_is_larger_than_all(found_by: Any) -> None:
    values_N = np.array([1, np.inf, -2, np.nan, -np.inf], np.float32)
    ranked = [found_by.kth_magnitude(values_N, k) for k in range(1, 6)]
    assert np.isnan(ranked[0])
    assert ranked[1:] == [np.inf, np.inf, 2, 1]


def check_rows(x_BN: Float32s, k: int) -> None:
    kernels, plain = magnitudes.largest_of_rows(x_BN, k), plain_torch.largest_of_rows(x_BN, k)
    assert kernels is not None and plain is not None
    assert [one.tobytes() for one in kernels] == [one.tobytes() for one in plain]


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Float32s, int]:
    width = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 128, 200]))
    shape = (draw(st.integers(1, 3)), width)
    limits = st.sampled_from([LARGEST, -LARGEST])
    x_BN = draw(arrays(np.float32, shape, elements=ELEMENTS | NEAR | limits))
    return x_BN, draw(st.integers(1, width))


@given(matrices())
def test_the_same_elements_of_rows(case: tuple[Float32s, int]) -> None:
    check_rows(*case)


@pytest.mark.parametrize("width", [13, 256, 300])
@pytest.mark.parametrize("rectified", [False, True])
def test_every_k_of_random_rows(width: int, rectified: bool) -> None:
    x_BN = np.random.default_rng(width).normal(size=(4, width)).astype(np.float32)
    for k in range(1, width + 1):
        check_rows(np.maximum(x_BN, 0) if rectified else x_BN, k)


@BOTH
def test_equal_magnitudes_of_a_row_are_all_selected(found_by: Any) -> None:
    x_BN = np.array([[1, -2, 2, 2, 0, -1], [3, 3, 3, 3, 3, -3]], np.float32)
    found = found_by.largest_of_rows(x_BN, 2)
    assert found is not None
    assert found.tau_B.tolist() == [2, 3]
    assert found.indices_K.tolist() == [1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert found.values_K.tolist() == [-2, 2, 2, 3, 3, 3, 3, 3, -3]


@BOTH
def test_nothing_of_a_row_of_zeros_is_selected(found_by: Any) -> None:
    x_BN = np.zeros((3, 70), np.float32)
    x_BN[1, 69] = 5
    found = found_by.largest_of_rows(x_BN, 4)
    assert found is not None
    assert (found.indices_K.tolist(), found.tau_B.tolist()) == ([139], [0, 0, 0])


@BOTH
def test_a_row_that_is_not_finite_is_seen(found_by: Any) -> None:
    for case in product(NOT_FINITE, (0, 63, 64, 129), (1, 130)):
        bad, index, k = case
        x_BN = np.full((3, 130), LARGEST)
        found = found_by.largest_of_rows(x_BN, k)
        assert found is not None and found.indices_K.size == 390, case
        x_BN[2, index] = bad
        assert found_by.largest_of_rows(x_BN, k) is None, case


VALUES = arrays(
    np.float32,
    st.integers(0, 300),
    elements=st.floats(-(2.0**60), 2.0**60, width=32) | st.sampled_from([0.0, -0.0, 1e-45, 0.5]),
)


@given(VALUES, st.sampled_from([0.0, 0.5, 100.0]))
def test_sums_are_those_of_float64(values_N: Float32s, shift: float) -> None:
    found, expected = magnitudes.moments(values_N, shift), plain_torch.moments(values_N, shift)
    scale = np.abs(values_N.astype(np.float64)).sum() + shift * values_N.size
    np.testing.assert_allclose(found[:2], expected[:2], rtol=0, atol=1e-13 * scale)
    assert found.squares == pytest.approx(expected.squares, rel=1e-12)
    assert found.largest == expected.largest


@BOTH
def test_what_is_not_finite_shows_in_all_moments(found_by: Any) -> None:
    for case in product(NOT_FINITE, (3, 70)):
        bad, index = case
        values_N = np.ones(80, np.float32)
        values_N[index] = bad
        assert not np.isfinite(found_by.moments(values_N, 0.0)).any(), case
        assert found_by.reaching(values_N, 2.0).tolist() == [index], case


@given(
    arrays(np.float32, st.integers(0, 300), elements=ELEMENTS),
    st.floats(0, 9, width=32),
    st.integers(0, 2**63 - 1),
)
def test_the_same_codes_are_drawn(values_N: Float32s, limit: float, key: int) -> None:
    scale = float(np.float32(max(limit, 1e-3)))
    kernels, plain = np.empty(values_N.size, np.uint8), np.empty(values_N.size, np.uint8)
    ternary_kernels.ternarise(values_N, limit, scale, key, kernels)
    plain_torch.ternarise(values_N, limit, scale, key, plain)
    assert kernels.tobytes() == plain.tobytes()
