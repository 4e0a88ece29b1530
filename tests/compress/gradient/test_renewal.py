"""When a threshold is renewed."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.gradient.methods.dct import Dct
from dlrm_hybrid.compress.gradient.thresholded import Thresholds

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
