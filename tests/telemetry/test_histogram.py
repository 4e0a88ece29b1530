"""Quantiles are those of numpy, to the error that is stated; parts add up to the whole."""

import json
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.telemetry.histogram import (
    SAMPLED,
    Histogram,
    IdSample,
    count_distinct,
    merged_by_trainer,
)

NUMBERS = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 1 << 60)), min_size=1, max_size=60)
SHARES = st.sampled_from([0.0, 0.01, 0.5, 0.95, 0.99, 1.0])


def counted(numbers: Sequence[int]) -> Histogram:
    found = Histogram()
    for number in numbers:
        found.add(number)
    return found


@given(NUMBERS, SHARES)
def test_quantiles_are_those_of_the_numbers_themselves(numbers: list[int], share: float) -> None:
    found = counted(numbers)
    expected = sorted(numbers)[max(0, int(np.ceil(share * len(numbers))) - 1)]
    quantile = found.quantile(share)
    assert quantile is not None
    assert abs(quantile - expected) <= (0 if expected < 256 else 0.004 * expected)
    assert (found.count, found.total, found.largest) == (len(numbers), sum(numbers), max(numbers))


@given(st.lists(st.lists(st.integers(0, 5000), max_size=30), max_size=5))
def test_parts_that_were_sent_add_up_to_the_whole(parts: list[list[int]]) -> None:
    sent = (json.loads(json.dumps(counted(part).to_json())) for part in parts)
    apart = Histogram.merged(map(Histogram.from_json, sent))
    assert apart == counted([number for part in parts for number in part])


def test_trainers_are_merged_each_with_itself_and_nothing_is_changed() -> None:
    first, second = {1: counted([3])}, {0: counted([1]), 1: counted([5])}
    assert merged_by_trainer([first, second]) == {0: counted([1]), 1: counted([3, 5])}
    assert list(merged_by_trainer([first, second])) == [0, 1]
    assert first == {1: counted([3])}


def test_what_a_summary_says() -> None:
    found = counted([1] * 90 + [10] * 9 + [100])
    assert found.figures(50, 95, 99) == {"mean": 2.8, "p50": 1, "p95": 10, "p99": 10, "max": 100}
    assert set(Histogram().figures(50).values()) == {None}


def test_memory_stays_the_same_however_many_are_counted() -> None:
    numbers = (10 ** np.random.default_rng(0).uniform(0, 18, 100_000)).astype(np.int64)
    assert len(counted(numbers.tolist()).counts) < 60 * 128


@given(
    arrays(np.int64, st.tuples(st.integers(1, 5), st.integers(1, 9)), elements=st.integers(0, 4))
)
def test_each_id_counts_once_in_its_table(ids_FB: np.ndarray) -> None:
    before = ids_FB.copy()
    assert count_distinct(Bags(ids_FB)) == sum(len(set(ids_B.tolist())) for ids_B in ids_FB)
    assert np.array_equal(ids_FB, before)


def test_some_batches_are_sampled_the_first_among_them() -> None:
    sample = IdSample()
    for number in range(2 * SAMPLED + 1):
        sample.add(Bags(np.arange(10 if number % SAMPLED == 0 else 99)[None]))
    assert (sample.ids.count, sample.ids.mean) == (3, pytest.approx(10))
