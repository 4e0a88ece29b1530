"""Sums, counts and extremes of magnitudes are those of numpy in float64."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dlrm_hybrid.kernels.moments import (
    count_reaching,
    gather_reaching,
    largest_magnitude,
    log_sum,
    magnitude_sums,
    sums,
)

VALUES = arrays(
    np.float32,
    st.integers(0, 300),
    elements=st.floats(-(2.0**60), 2.0**60, width=32) | st.sampled_from([0.0, -0.0, 1e-45, 0.5]),
)


@given(VALUES, st.sampled_from([0.0, 0.5, 100.0]))
def test_sums_are_those_of_float64(values_N: NDArray[np.float32], shift: float) -> None:
    wide_N = values_N.astype(np.float64)
    moved_N = np.abs(wide_N) - shift
    expected = [wide_N.sum(), (wide_N**2).sum(), moved_N.sum(), (moved_N**2).sum()]
    scale = np.abs(wide_N).sum() + shift * values_N.size
    squares = (wide_N**2).sum() + (moved_N**2).sum()
    found = [*sums(values_N), *magnitude_sums(values_N, shift)]
    np.testing.assert_allclose(found[::2], expected[::2], rtol=0, atol=1e-13 * scale)
    np.testing.assert_allclose(found[1::2], expected[1::2], rtol=0, atol=1e-13 * squares)


@given(VALUES)
def test_logarithms_leave_zeros_out(values_N: NDArray[np.float32]) -> None:
    sizes_N = np.abs(values_N[values_N != 0]).astype(np.float64)
    assert log_sum(values_N) == pytest.approx(np.log(sizes_N).sum(), rel=1e-12, abs=1e-9)


@pytest.mark.parametrize("value", [1e-45, 1.9999999, 3e38])
def test_products_of_many_mantissas_do_not_overflow(value: float) -> None:
    values_N = np.full(100_003, value, np.float32)
    expected = values_N.size * float(np.log(np.float64(values_N[0])))
    assert log_sum(values_N) == pytest.approx(expected, rel=1e-12)


@given(VALUES, st.sampled_from([0.0, 1e-45, 0.5, 2.0**40]))
def test_what_reaches_a_magnitude_is_counted_and_listed(
    values_N: NDArray[np.float32], tau: float
) -> None:
    sizes_N = np.abs(values_N)
    reaching_K = sizes_N[(sizes_N >= np.float32(tau)) & (sizes_N > 0)]
    out_N = np.empty_like(values_N)
    assert count_reaching(values_N, tau) == reaching_K.size
    assert out_N[: gather_reaching(values_N, tau, out_N)].tolist() == reaching_K.tolist()
    kept = gather_reaching(values_N, tau, values_N)
    assert values_N[:kept].tolist() == reaching_K.tolist()
    assert largest_magnitude(sizes_N) == sizes_N.max(initial=0)


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("place", [3, 70])
def test_what_is_not_finite_reaches_everything_and_shows(bad: float, place: int) -> None:
    values_N = np.ones(80, np.float32)
    values_N[place] = bad
    assert not np.isfinite([*sums(values_N), *magnitude_sums(values_N, 0.0)]).any()
    assert not np.isfinite(largest_magnitude(values_N))
    assert count_reaching(values_N, 2.0) == 1
