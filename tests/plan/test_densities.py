"""Densities of a planned run, of those along another one."""

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.plan.layout import Densities, Interval
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS

RISING = (
    Interval(WARMUP_STEPS, {"a": 0.5}),  # not timed
    Interval(35, {"a": 0.01, "b": 0.2}),
    Interval(20, {"a": 0.02, "b": 0.2}),
    Interval(20, {"a": 0.04, "b": 0.2}),
)


def share(steps: float, course: tuple[Interval, ...] = RISING) -> float:
    return Densities(gradient={"a": 0.9, "c": 0.3}, course=course).over(steps).gradient["a"]


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (20, 0.01),
        (40, 0.01),
        (60, (35 * 0.01 + 20 * 0.02) / 55),
        (80, (35 * 0.01 + 20 * 0.02 + 20 * 0.04) / 75),
        (120, (35 * 0.01 + 20 * 0.02 + 20 * 0.04 + 40 * 0.03) / 115),  # 40 more, as the second half
        (inf, 0.03),
    ],
)
def test_a_run_is_as_dense_as_so_many_timed_steps_were(steps: float, expected: float) -> None:
    assert share(steps) == pytest.approx(expected)


def test_tensors_and_runs_that_nothing_is_known_of_are_left() -> None:
    known = Densities(gradient={"a": 0.9, "c": 0.3}, course=RISING).over(50).gradient
    assert (known["b"], known["c"]) == (pytest.approx(0.2), 0.3)
    assert share(50, ()) == 0.9
    assert share(3) == 0.5  # shorter than what is not timed


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(1e-4, 1)), min_size=1), st.integers(1, 999))
def test_a_mean_lies_between_the_least_and_the_most(
    parts: list[tuple[int, float]], steps: int
) -> None:
    course = tuple(Interval(length, {"a": density}) for length, density in parts)
    found = share(steps, course)
    assert min(parts, key=lambda one: one[1])[1] <= found * (1 + 1e-9)
    assert found <= max(parts, key=lambda one: one[1])[1] * (1 + 1e-9)


def test_longer_runs_come_ever_nearer_to_the_second_half() -> None:
    away = [abs(share(steps) - 0.03) for steps in (80, 160, 320, 10_000)]
    assert all(later < sooner for sooner, later in pairwise(away))
    assert away[-1] < 1e-4
