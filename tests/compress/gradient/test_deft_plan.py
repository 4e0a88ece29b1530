"""DEFT's plan: fragments, budgets and bins."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.compress.gradient.fragments import (
    allocate,
    costs,
    exact_budget,
    paper_budget,
    partition,
    sizes_of,
)

NORMS = st.one_of(st.just(0.0), st.floats(1e-30, 1e30), st.sampled_from([1.0, 2.0]))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=12), st.integers(1, 9))
def test_fragments_tile_the_vector_and_none_is_larger_than_a_share(
    counts: list[int], trainers: int
) -> None:
    fragments = partition(counts, trainers)
    ends = [part.stop for part in fragments]
    assert [part.start for part in fragments] == [0, *ends[:-1]][: len(ends)]
    assert sum(sizes_of(fragments)) == sum(counts)
    bounds = set(np.cumsum(counts).tolist())
    assert bounds - {0} <= set(ends), "a fragment lies across two tensors"
    if sum(counts):
        assert sizes_of(fragments).max() <= -(-sum(counts) // trainers)
        assert sizes_of(fragments).min() >= 1
    if trainers == 1:
        assert sizes_of(fragments).tolist() == [count for count in counts if count]


def test_a_tensor_of_just_a_share_stays_whole() -> None:
    assert sizes_of(partition([50, 25, 25], 2)).tolist() == [50, 25, 25]
    assert sizes_of(partition([51, 25, 24], 2)).tolist() == [26, 25, 25, 24]


GOLDEN = np.array([8.0, 4.0, 3.0, 1.0]), np.array([5, 100, 100, 100])


@pytest.mark.parametrize(
    ("budget", "exact", "paper"),
    [(32, [5, 13, 10, 4], [5, 13, 10, 4]), (3, [1, 1, 1, 0], [1, 1, 1, 1])],
)
def test_golden_budgets(budget: int, exact: list[int], paper: list[int]) -> None:
    assert exact_budget(*GOLDEN, budget).tolist() == exact
    assert paper_budget(*GOLDEN, budget).tolist() == paper


@given(st.lists(st.tuples(NORMS, st.integers(1, 60)), min_size=1, max_size=12), st.data())
def test_budgets_are_spent(fragments: list[tuple[float, int]], data: st.DataObject) -> None:
    norms_L = np.array([norm for norm, _ in fragments])
    sizes_L = np.array([size for _, size in fragments])
    budget = data.draw(st.integers(1, int(sizes_L.sum())))
    exact_L, paper_L = (give(norms_L, sizes_L, budget) for give in (exact_budget, paper_budget))
    for keeps_L in (exact_L, paper_L):
        assert ((keeps_L >= 0) & (keeps_L <= sizes_L)).all()
    assert exact_L.sum() == min(budget, int(sizes_L[norms_L > 0].sum()))
    assert not exact_L[norms_L == 0].any()
    assert (paper_L >= 1).all()
    assert paper_L.sum() <= budget + len(fragments)
    if (exact_L < sizes_L).all():  # what does not fit into a full one goes to those that follow
        for one, other in itertools.permutations(range(len(fragments)), 2):
            assert norms_L[one] <= norms_L[other] or exact_L[one] >= exact_L[other] - 1


@given(st.lists(st.integers(0, 10), min_size=1, max_size=7), st.integers(1, 4))
def test_no_bin_is_much_heavier_than_it_must_be(sizes: list[int], bins: int) -> None:
    costs_L = np.array(sizes, float)
    bins_L = allocate(costs_L, bins)
    loads = np.bincount(bins_L, costs_L, bins)
    best = min(
        np.bincount(choice, costs_L, bins).max()
        for choice in itertools.product(range(bins), repeat=len(sizes))
    )
    assert loads.max() <= (4 / 3 - 1 / (3 * bins)) * best + 1e-9
    assert loads.max() <= costs_L.mean() * len(sizes) / bins + costs_L.max() + 1e-9


def test_keeping_one_costs_a_pass_and_nothing_nothing() -> None:
    sizes_L, keeps_L = np.array([100, 100, 100, 100]), np.array([0, 1, 2, 8])
    assert costs(sizes_L, keeps_L).tolist() == [0, 100, 100, 300]
