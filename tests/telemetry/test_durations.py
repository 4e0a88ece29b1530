"""Quantiles are those of numpy, to the error that is stated; parts add up to the whole."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.telemetry.distributions.durations import (
    RELATIVE_ERROR,
    DurationCounter,
    Durations,
    from_json,
    merged,
)

SECONDS = st.one_of(
    st.floats(1e-6, 3e7), st.integers(-40, 100).map(lambda power: 1e-3 * 1.02**power)
)
MANY = st.lists(SECONDS, max_size=60)


def counted(times: Sequence[float]) -> Durations:
    counter = DurationCounter()
    for seconds in times:
        counter.add(seconds)
    return counter.snapshot()


@given(MANY, st.sampled_from([0.0, 0.01, 0.5, 0.95, 0.99, 1.0]))
def test_quantiles_are_those_of_the_times_themselves(times: list[float], share: float) -> None:
    found = counted(times).quantile(share)
    if not times:
        assert found is None
        return
    expected = np.quantile(times, share, method="inverted_cdf")
    assert found == pytest.approx(expected, rel=RELATIVE_ERROR)


@given(st.lists(MANY, max_size=5))
def test_parts_add_up_to_the_whole(parts: list[list[float]]) -> None:
    apart = merged(from_json(counted(times).to_json()) for times in parts)
    whole = counted([seconds for times in parts for seconds in times])
    assert apart.counts == whole.counts
    assert apart.count == sum(map(len, parts))
    assert apart.largest_seconds == whole.largest_seconds
    assert apart.total_seconds == pytest.approx(whole.total_seconds)


def test_a_summary_says_milliseconds() -> None:
    found = counted([0.001] * 90 + [0.01] * 9 + [0.1]).milliseconds()
    assert found["mean"] == pytest.approx((90 * 1 + 9 * 10 + 100) / 100)
    assert found["max"] == 100
    quantiles = [found[name] for name in ("p50", "p95", "p99")]
    assert quantiles == pytest.approx([1, 10, 10], rel=RELATIVE_ERROR)
    assert set(Durations().milliseconds().values()) == {None}


def test_memory_stays_the_same_however_many_are_counted() -> None:
    rng = np.random.default_rng(0)
    times = 10 ** rng.uniform(-9, 12, 100_000)
    found = counted([0.0, *times])
    assert len(found.counts) <= 1601
    assert found.count == 100_001
    assert found.largest_seconds == max(times)
