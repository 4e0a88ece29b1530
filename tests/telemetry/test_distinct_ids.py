"""Every 64th batch of those that are read is counted, each id once in its table."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.telemetry.distributions.distinct_ids import (
    EVERY,
    IdSample,
    count_distinct,
    mean_ids,
)

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 9))


@given(arrays(np.int64, SHAPES, elements=st.integers(0, 4)))
def test_each_id_counts_once_in_its_table(ids_FB: np.ndarray) -> None:
    before = ids_FB.copy()
    assert count_distinct(Bags(ids_FB)) == sum(len(set(ids_B.tolist())) for ids_B in ids_FB)
    assert np.array_equal(ids_FB, before)


def test_the_mean_is_of_all_batches_that_were_counted() -> None:
    samples = [IdSample(), IdSample()]
    assert samples[0].to_json() is None and mean_ids([]) is None
    for number in range(2 * EVERY + 1):
        samples[0].add(Bags(np.arange(10 if number % EVERY == 0 else 99)[None]))
    samples[1].add(Bags(np.zeros((2, 7), np.int64)))
    told = [found for sample in samples if (found := sample.to_json()) is not None]
    assert told == [{"batches": 3, "ids": 30}, {"batches": 1, "ids": 2}]
    assert mean_ids(told) == pytest.approx(8)
