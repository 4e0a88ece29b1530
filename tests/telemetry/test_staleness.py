import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.telemetry.distributions.staleness import (
    Staleness,
    StalenessCounter,
    from_json,
    merged,
    to_json,
    values_of,
)

pushes = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5000)), max_size=60)


def counted(given_pushes: list[tuple[int, int]]) -> dict[int, Staleness]:
    counter = StalenessCounter()
    for trainer, staleness in given_pushes:
        counter.add(trainer, staleness)
    return counter.snapshot()


@given(first=pushes, second=pushes)
def test_what_is_merged_was_counted_together(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    several = [from_json(json.loads(json.dumps(to_json(counted(one))))) for one in (first, second)]
    both = counted([*first, *second])
    assert merged(several) == both
    values = values_of(both)
    assert json.loads(json.dumps(values)) == values
    assert values["pushes"] == len(first) + len(second)
    assert sum(one["pushes"] for one in values["by_trainer"].values()) == values["pushes"]
    assert list(both) == sorted({trainer for trainer, _ in [*first, *second]})


@given(st.lists(st.integers(0, 1023), min_size=1, max_size=60), st.sampled_from([0.5, 0.95, 1.0]))
def test_below_1024_all_is_exact(values: list[int], share: float) -> None:
    found = counted([(0, value) for value in values])[0]
    assert found.mean == pytest.approx(np.mean(values), rel=1e-12)
    assert found.quantile(share) == np.quantile(values, share, method="inverted_cdf")
    assert (found.largest, found.pushes) == (max(values), len(values))


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=60), st.sampled_from([0.5, 0.95]))
def test_above_a_quantile_is_rounded_up_by_less_than_twice(values: list[int], share: float) -> None:
    found = counted([(0, value) for value in values])[0]
    assert found.total == sum(values)
    exact = int(np.quantile(values, share, method="inverted_cdf"))
    rounded = found.quantile(share)
    assert rounded is not None
    assert exact <= rounded <= max(exact, min(2 * exact, max(values)))


def test_counts_are_few_however_stale() -> None:
    counts = counted([(7, staleness) for staleness in [1023, 1024, 1500, 2047, 2048, 1 << 30]])
    assert dict(counts[7].counts) == {1023: 1, 1024: 3, 2048: 1, 1 << 30: 1}
    assert counts[7].values() == {
        "pushes": 6,
        "mean": (1023 + 1024 + 1500 + 2047 + 2048 + (1 << 30)) / 6,
        "p50": 2047,
        "p95": 1 << 30,
        "max": 1 << 30,
    }


def test_without_pushes_nothing_is_said() -> None:
    nothing = {"pushes": 0, "mean": None, "p50": None, "p95": None, "max": None}
    assert values_of(counted([])) == {**nothing, "by_trainer": {}}


def test_a_snapshot_does_not_change() -> None:
    counter = StalenessCounter()
    counter.add(0, 3)
    before = counter.snapshot()
    counter.add(0, 3)
    assert before[0].pushes == 1
    assert counter.snapshot()[0].pushes == 2
