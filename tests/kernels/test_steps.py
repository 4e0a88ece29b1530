"""Values of rows as levels of the row's step: what rounding takes, and where it goes."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.kernels.levels.steps import quantise, restore

UNITS = 5
ROWS = arrays(
    np.float32,
    st.tuples(st.integers(1, 12), st.just(UNITS)),
    elements=st.floats(-1e3, 1e3, width=32, allow_subnormal=False),
)


def sent(rows_BN: np.ndarray, bits: int, *, is_gradient: bool) -> tuple[np.ndarray, np.ndarray]:
    """What arrives of all values, and the step of each row."""
    indices_K = np.arange(rows_BN.size, dtype=np.int32)
    levels_K, codes_B = np.empty(rows_BN.size, np.int16), np.empty(len(rows_BN), np.int16)
    assert quantise(indices_K, rows_BN.reshape(-1), UNITS, bits, is_gradient, levels_K, codes_B)
    assert np.abs(levels_K).max() < 2**bits
    arrived_BN = np.empty_like(rows_BN)
    restore(indices_K, levels_K, codes_B, arrived_BN)
    steps_B = (codes_B.astype(np.uint32) << 21).view(np.float32)
    return arrived_BN, steps_B


CANCELLED = np.zeros((3, UNITS), np.float32)
CANCELLED[:, 0] = 1, -0.0625, 0.01  # what rounding takes of the first makes the second 0


@example(CANCELLED, 2)
@given(ROWS, st.sampled_from([2, 3, 7]))
def test_of_the_sum_over_rows_less_than_a_step_is_missing(rows_BN: np.ndarray, bits: int) -> None:
    arrived_BN, steps_B = sent(rows_BN, bits, is_gradient=True)
    # Where a row has no step nothing is missing: all values and what came to them are 0.
    missing_BN = np.cumsum(rows_BN.astype(np.float64) - arrived_BN, axis=0)
    float32s_own = 1e-6 * np.abs(rows_BN).sum()
    assert (np.abs(missing_BN) <= steps_B[:, None] + float32s_own).all()


def test_a_unit_of_small_gradients_learns() -> None:
    rows_BN = np.tile(np.float32([1, -1, 0.5, 0.02, 0]), (400, 1))
    arrived_BN, _ = sent(rows_BN, 3, is_gradient=True)
    assert arrived_BN.mean(0) == pytest.approx(rows_BN[0], abs=1e-3)
    assert 0 < np.count_nonzero(arrived_BN[:, 3]) < 100


@given(ROWS, st.sampled_from([3, 4, 8]))
def test_an_activation_is_as_near_as_can_be_and_never_nothing(
    rows_BN: np.ndarray, bits: int
) -> None:
    rows_BN = np.where(rows_BN == 0, np.float32(1), rows_BN)
    arrived_BN, steps_B = sent(rows_BN, bits, is_gradient=False)
    # The largest of a row may be up to 7/8 of a step beyond the last level.
    wrong_BN = np.abs(rows_BN - arrived_BN)
    is_small_BN = np.abs(rows_BN) < steps_B[:, None] / 2
    assert (np.where(is_small_BN, 0, wrong_BN) <= steps_B[:, None] * 0.876).all()
    is_inside_BN = ~is_small_BN & (np.abs(rows_BN) < (2**bits - 1) * steps_B[:, None])
    assert (np.where(is_inside_BN, wrong_BN, 0) <= steps_B[:, None] / 2).all()
    assert (np.abs(arrived_BN) == steps_B[:, None])[is_small_BN].all()
