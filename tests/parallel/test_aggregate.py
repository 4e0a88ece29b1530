from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.parallel.aggregate import Aggregate
from dlrm_hybrid.parallel.changes import Changes, whole

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SENT = FINITE.filter(lambda value: value != 0)
"""Zeros are never sent as elements: only a whole tensor has them."""


@st.composite
def gradient(draw: st.DrawFn, count: int) -> Changes:
    if draw(st.booleans()):
        values = draw(st.lists(FINITE, min_size=count, max_size=count))
        return Changes(None, np.array(values, np.float32))
    indices = draw(st.sets(st.integers(0, count - 1)))
    values = draw(st.lists(SENT, min_size=len(indices), max_size=len(indices)))
    return Changes(np.array(sorted(indices), np.int32), np.array(values, np.float32))


@st.composite
def steps_of_pushes(draw: st.DrawFn) -> tuple[int, list[list[Changes]]]:
    count, trainers = draw(st.integers(1, 150)), draw(st.integers(1, 4))
    pushes = st.lists(gradient(count), min_size=trainers, max_size=trainers)
    return count, draw(st.lists(pushes, min_size=1, max_size=3))


def dense_mean(gradients: Sequence[Changes], count: int) -> NDArray[np.float32]:
    """Zeros written out, one trainer after the other, then divided."""
    first, *others = (whole(one, count).values_K for one in gradients)
    total = first.copy()
    for other in others:
        total = total + other
    return total / np.float32(len(gradients))


def said(changes: Changes, count: int) -> set[int]:
    return set(range(count) if changes.indices_K is None else changes.indices_K.tolist())


@given(steps_of_pushes())
def test_parts_have_the_mean_of_the_whole_bit_for_bit(drawn: tuple[int, list[list[Changes]]]):
    count, steps = drawn
    aggregate = Aggregate(count)
    with np.errstate(over="ignore", invalid="ignore"):
        for gradients in steps:
            mean = aggregate.mean(gradients)
            found = whole(mean, count).values_K
            assert found.tobytes() == dense_mean(gradients, count).tobytes()
            assert said(mean, count) == set.union(*(said(one, count) for one in gradients))
            if mean.indices_K is not None:
                assert (np.diff(mean.indices_K) > 0).all()


def test_elements_that_cancel_out_are_still_told():
    """A replica may know an older value of them: nothing else would bring it up to date."""
    first = Changes(np.array([2, 70], np.int32), np.array([1.5, 1.0], np.float32))
    second = Changes(np.array([2], np.int32), np.array([-1.5], np.float32))
    indices_K, values_K = Aggregate(100).mean([first, second])
    assert indices_K is not None
    assert (indices_K.tolist(), values_K.tolist()) == ([2, 70], [0.0, 0.5])


def test_the_order_of_the_trainers_is_the_order_of_the_sum():
    index = np.array([0], np.int32)
    parts = [Changes(index, np.array([value], np.float32)) for value in (1e8, -1e8, 1.0)]
    in_order = Aggregate(1).mean(parts).values_K.copy()
    assert in_order.tolist() == [np.float32(1) / np.float32(3)]
    assert Aggregate(1).mean([parts[0], parts[2], parts[1]]).values_K.tolist() == [0.0]
