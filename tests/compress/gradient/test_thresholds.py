"""Thresholds: what the rules find, when they are renewed; what is drawn, selected and drained."""

from fractions import Fraction
from math import sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.error_feedback import Drain
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.methods.dct import Dct
from dlrm_hybrid.compress.gradient.methods.dgc import sample
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold, ExactThreshold
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder, target_k
from dlrm_hybrid.compress.gradient.selector import largest
from dlrm_hybrid.compress.gradient.thresholded import Thresholds

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


CONTROLLED = Dct(lifespan=100, renewal="controlled")
FIXED = Dct(lifespan=4, renewal="fixed", staggered=True)


def test_fixed_renewals_come_at_multiples_whatever_was_sent() -> None:
    ended = [FIXED.renews(step=step, age=1, sent=10**6, k=1) for step in range(9)]
    assert ended == [True, False, False, False] * 2 + [True]


def test_staggered_renewals_are_spread_over_the_life() -> None:
    layout = Layout([Spec(place, f"{place}", (200,)) for place in range(8)])
    state = Thresholds(layout, FIXED, [{}] * 8)
    state.taus_T[:] = 1
    due = [state.due(FIXED, step) for step in range(8)]
    renewed = [[step for step in range(8) if place in due[step]] for place in range(8)]
    assert renewed == [[0, 4], [0, 4], [3, 7], [3, 7], [2, 6], [2, 6], [1, 5], [1, 5]]
    assert [state.due(CONTROLLED, step) for step in range(8)] == [[]] * 8


@pytest.mark.parametrize(
    ("age", "sent", "ended"),
    [
        (1, 10, False),
        (1, 0, False),
        (1, 22, False),
        (1, 23, True),
        (10, 70, False),
        (10, 69, True),
        (10, 135, False),
        (10, 136, True),
        (99, 990, False),
        (100, 1000, True),
    ],
)
def test_controlled_renewals_look_at_what_was_sent(age: int, sent: int, ended: bool) -> None:
    assert CONTROLLED.renews(step=7, age=age, sent=sent, k=10) is ended


@given(st.integers(1, 99), st.integers(1, 10**6), st.integers(0, 10**9))
def test_the_bounds_are_a_fifth_and_a_quarter_beyond_a_step(age: int, k: int, sent: int) -> None:
    lowest, highest = Fraction(4, 5) * age - 1, Fraction(5, 4) * age + 1
    inside = lowest <= Fraction(sent, k) <= highest
    assert CONTROLLED.renews(step=0, age=age, sent=sent, k=k) is not inside


FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-45, 3.0])


@given(arrays(np.float32, st.integers(1, 200), elements=FEW), st.data())
def test_the_largest_are_those_of_a_stable_sort(values_N: np.ndarray, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, values_N.size))
    order = np.argsort(-np.abs(values_N), kind="stable")[:count]
    expected_K = np.sort(order[values_N[order] != 0])
    found_K = largest(values_N, count)
    assert found_K.dtype == np.int32
    np.testing.assert_array_equal(found_K, expected_K)


def drawn(count: int, size: int, seed: int) -> np.ndarray:
    return sample(np.arange(count, dtype=np.float32), seed, size).astype(int)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (10, 10), (1000, 7), (1003, 100)])
def test_every_block_gives_one_element(count: int, size: int) -> None:
    bounds = np.arange(size + 1) * count // size
    for seed in range(20):
        places_S = drawn(count, size, seed)
        assert (bounds[:-1] <= places_S).all() and (places_S < bounds[1:]).all()
        assert places_S.tolist() == drawn(count, size, seed).tolist()


def test_places_in_a_block_are_equally_likely() -> None:
    within = np.concatenate([drawn(8000, 1000, seed) % 8 for seed in range(20)])
    counts = np.bincount(within, minlength=8)
    deviation = np.sqrt(20_000 * (1 / 8) * (7 / 8))
    assert (np.abs(counts - 2500) < 4 * deviation).all()
    apart = [np.mean(drawn(8000, 1000, 0) == drawn(8000, 1000, seed)) for seed in range(1, 9)]
    assert 0.05 < np.mean(apart) < 0.2


def due(mode: DrainMode, every: int, trainer: int, name: str, seed: int = 7) -> list[int]:
    drain = Drain(mode=mode, every=every, seed=seed, trainer=trainer)
    return [step for step in range(4000) if drain.is_due(name, step)]


def test_the_number_of_drains_is_binomial() -> None:
    counts = [len(due("discard", 10, 0, f"layer.{place}")) for place in range(8)]
    deviation = sqrt(4000 * 0.1 * 0.9)
    assert all(abs(count - 400) < 4 * deviation for count in counts)
    mean_square = sum((count - 400) ** 2 for count in counts) / 8
    assert 0.2 < mean_square / deviation**2 < 3


def test_trainers_tensors_and_seeds_draw_apart_and_modes_alike() -> None:
    base = due("discard", 10, 0, "a")
    assert due("flush", 10, 0, "a") == base
    others = [
        due("discard", 10, 1, "a"),
        due("discard", 10, 0, "b"),
        due("discard", 10, 0, "a", seed=8),
    ]
    # Independent draws meet at 1 step in 100.
    assert all(len(set(base) & set(other)) < 80 for other in others)


def test_no_drain_and_a_drain_at_every_step() -> None:
    assert due("none", 1, 0, "a") == []
    assert due("discard", 1, 0, "a") == list(range(4000))
