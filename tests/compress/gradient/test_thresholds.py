"""What the rules find, and how many elements they are asked for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold, ExactThreshold
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder, target_k

RULES: list[ThresholdFinder] = [ExactThreshold(), CountedThreshold()]

# The paper's 8 layers: bottom 13-512-256-64-16, top 367-512-256-128-1, weights and biases.
WIDTHS = [(13, 512, 256, 64, 16), (367, 512, 256, 128, 1)]
COUNTS = [
    size
    for widths in WIDTHS
    for before, after in zip(widths, widths[1:], strict=False)
    for size in (before * after, after)
]


@pytest.mark.parametrize(
    ("count", "kept"), [(256, [64, 26, 13, 6, 2]), (16, [4, 2, 1, 1, 1]), (1, [1, 1, 1, 1, 1])]
)
def test_kept_elements_of_the_papers_sparsities(count: int, kept: list[int]) -> None:
    assert [target_k(count, sparsity) for sparsity in (0.75, 0.9, 0.95, 0.98, 0.995)] == kept


@pytest.mark.parametrize(("sparsity", "kept"), [(0.95, 25_446), (0.98, 10_186), (0.995, 2_553)])
def test_kept_elements_of_the_whole_model(sparsity: float, kept: int) -> None:
    assert sum(COUNTS) == 508_753
    assert sum(target_k(count, sparsity) for count in COUNTS) == kept


def test_kept_elements_are_counted_in_integers() -> None:
    assert target_k(100, 0.29) == 71
    assert target_k(100, 0.0) == 100
    assert target_k(100, 1.0) == 1
    assert target_k(0, 0.9) == 0


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(
    arrays(np.float32, st.integers(1, 80), elements=st.floats(-4, 4, width=32), unique=True),
    st.data(),
)
def test_as_many_elements_reach_the_threshold_as_are_kept(
    rule: ThresholdFinder, values_N: NDArray[np.float32], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, values_N.size))
    before = values_N.copy()
    tau = rule.tau(values_N, k, rule.init())
    sizes_N = np.abs(values_N)
    assert tau in sizes_N
    assert np.count_nonzero(sizes_N > tau) < k <= np.count_nonzero(sizes_N >= tau)
    np.testing.assert_array_equal(values_N, before)


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_zeros_and_ties_give_the_value_itself(rule: ThresholdFinder) -> None:
    assert rule.tau(np.zeros(8, np.float32), 2, {}) == 0
    assert rule.tau(np.full(8, -0.5, np.float32), 2, {}) == 0.5
    assert rule.tau(np.array([-3], np.float32), 1, {}) == 3
