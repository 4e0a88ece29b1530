"""The threshold by counting is the one that sorting finds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dlrm_hybrid.kernels.histogram import SAMPLED_FROM, STRIDE, magnitude_of_rank

RNG = np.random.default_rng(5)
DRAWS = {
    "normal": lambda count: RNG.standard_normal(count),
    "laplace": lambda count: RNG.laplace(size=count),
    "gamma": lambda count: RNG.gamma(0.5, size=count) * RNG.choice([-1, 1], count),
    "student": lambda count: RNG.standard_t(3, count),
}


def by_sorting(values_N: NDArray[np.float32], rank: int) -> float:
    return float(np.sort(np.abs(values_N))[values_N.size - rank])


@given(
    arrays(np.float32, st.integers(1, 300), elements=st.floats(width=32, allow_nan=False)),
    st.data(),
)
def test_any_values_in_any_rank(values_N: NDArray[np.float32], data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, values_N.size))
    assert magnitude_of_rank(values_N, rank) == by_sorting(values_N, rank)


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("count", [SAMPLED_FROM, 100_003])
@pytest.mark.parametrize("density", [1.0, 0.5, 0.1, 0.01, 0.001])
def test_large_tensors_are_sampled_first(name: str, count: int, density: float) -> None:
    values_N = (DRAWS[name](count) * 1e-3).astype(np.float32)
    rank = max(1, int(density * count))
    tau = magnitude_of_rank(values_N, rank)
    assert tau == by_sorting(values_N, rank)
    assert rank <= np.count_nonzero(np.abs(values_N) >= tau) <= 1.05 * rank + 1


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1e3])
def test_a_sample_that_misleads_costs_only_time(scale: float) -> None:
    values_N = RNG.standard_normal(50_000).astype(np.float32)
    values_N[::STRIDE] *= np.float32(scale)
    assert magnitude_of_rank(values_N, 500) == by_sorting(values_N, 500)


@pytest.mark.parametrize("value", [0.0, -1.5])
def test_ties(value: float) -> None:
    values_N = np.full(20_000, value, np.float32)
    assert magnitude_of_rank(values_N, 200) == abs(value)
    values_N[7] = 3
    assert magnitude_of_rank(values_N, 1) == 3
    assert magnitude_of_rank(values_N, 2) == abs(value)


def test_what_is_not_finite_is_larger_than_all() -> None:
    values_N = np.array([1, np.inf, -2, np.nan, -np.inf], np.float32)
    ranked = [magnitude_of_rank(values_N, rank) for rank in range(1, 6)]
    assert np.isnan(ranked[0])
    assert ranked[1:] == [np.inf, np.inf, 2, 1]
