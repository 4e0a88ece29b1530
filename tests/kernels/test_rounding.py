"""Values as integer multiples of a power of two."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.kernels.levels.rounding import MOST, add_levels, round_to_levels

FINITE = st.floats(allow_nan=False, allow_infinity=False, width=32)


def rounded(values_K: np.ndarray, splits_E: list[int]) -> np.ndarray:
    out_K = np.empty_like(values_K)
    assert round_to_levels(np.array(splits_E), values_K, out_K) == -1
    return out_K


@given(arrays(np.float32, st.integers(0, 40), elements=FINITE))
def test_levels_and_rest_are_the_values_bit_for_bit(values_K: np.ndarray) -> None:
    out_K = rounded(values_K, [0, values_K.size])
    rest_K = values_K - out_K
    assert np.array_equal(out_K.astype(np.float64) + rest_K, values_K)
    assert np.array_equal(rest_K + out_K, values_K)
    sent_K = np.abs(out_K[out_K != 0].astype(np.float64))
    if sent_K.size:
        # All are multiples of a power of two, and few of it.
        quantum = np.ldexp(1.0, np.frexp(sent_K)[1] - 8).min()
        levels_K = sent_K / quantum
        assert np.array_equal(levels_K, np.rint(levels_K))
        bits_K = out_K.view(np.uint32)
        assert not (bits_K & 0xFFFF).any(), "a bfloat16 holds them"


@given(
    arrays(np.float32, st.integers(1, 40), elements=st.floats(0.5, 1.0, width=32)),
    st.integers(-30, 30),
)
def test_what_a_threshold_selects_is_sent(values_K: np.ndarray, exponent: int) -> None:
    values_K = np.ldexp(values_K, exponent).astype(np.float32)
    out_K = rounded(values_K, [0, values_K.size])
    assert (out_K != 0).all()
    assert np.abs(values_K - out_K).max() <= 2.0 ** (exponent - 2)
    levels_K = out_K / 2.0 ** (exponent - 2)
    assert np.array_equal(levels_K, np.rint(levels_K))


def test_every_tensor_has_a_quantum_of_its_own() -> None:
    values_K = np.array([1.1, -2.9, 0.011, 0.02, 300.0], np.float32)
    out_K = rounded(values_K, [0, 2, 2, 4, 5])
    assert out_K.tolist() == [1.0, -3.0, 2.0**-7, 3 * 2.0**-7, 256.0]


def test_a_few_large_values_do_not_drive_the_others_out() -> None:
    values_K = np.array([1.0] * 99 + [1e6], np.float32)
    out_K = rounded(values_K, [0, 100])
    # The mean is 1e4: the others wait until they are worth a level.
    assert np.flatnonzero(out_K).tolist() == [99]
    assert out_K[-1] == 244 * 2.0**12
    assert MOST > 244


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_the_tensor_whose_values_are_not_finite_is_named(bad: float) -> None:
    values_K = np.array([1, 2, bad], np.float32)
    assert round_to_levels(np.array([0, 1, 3]), values_K, np.empty_like(values_K)) == 1


def test_levels_are_added_and_zeros_dropped() -> None:
    offsets_E, splits_E = np.array([0, 4, 4, 9]), np.array([0, 2, 2, 5])
    local_K = np.array([1, 3, 0, 2, 4], np.int32)
    rounded_K = np.array([0.5, 0, -0.0, 2, -1], np.float32)
    value_N = np.array([1, 1, 1, 1, -0.0, 1, 1, 1, 1], np.float32)
    add_levels(offsets_E, splits_E, local_K, rounded_K, value_N)
    assert value_N.tolist() == [1, 1.5, 1, 1, 0, 1, 3, 1, 0]
    assert np.signbit(value_N[4]), "nothing was sent of it"
    assert splits_E.tolist() == [0, 1, 1, 3]
    assert (local_K[:3].tolist(), rounded_K[:3].tolist()) == ([1, 2, 4], [0.5, 2, -1])
