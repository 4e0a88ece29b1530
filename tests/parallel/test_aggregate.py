from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.compress.update import DenseUpdate, Update
from dlrm_hybrid.parallel.dense.bucket import Aggregate, Mean
from dlrm_hybrid.wire.sparse import Elements

Array = NDArray[np.float32]
FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SENT = FINITE.filter(lambda value: value != 0)
"""Zeros are never sent as elements: only a whole tensor has them."""


@st.composite
def push(draw: st.DrawFn, counts: Sequence[int]) -> Update:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(SENT)
    with np.errstate(over="ignore"):
        drawn = [np.float32(scale) * rng.normal(size=n).astype(np.float32) for n in counts]
    values = [np.nan_to_num(one) for one in drawn]
    if draw(st.booleans()):
        held = [one * (rng.random(one.size) < 0.5).astype(np.float32) for one in values]
        return DenseUpdate(held, [None] * len(held))
    chosen = [np.flatnonzero((rng.random(one.size) < 0.4) & (one != 0)) for one in values]
    return Elements(
        np.cumsum([0, *(one.size for one in chosen)]),
        np.concatenate(chosen).astype(np.int32),
        np.concatenate([one[which] for one, which in zip(values, chosen, strict=True)]),
    )


@st.composite
def steps_of_pushes(draw: st.DrawFn) -> tuple[list[int], list[list[Update]]]:
    counts = draw(st.lists(st.sampled_from([1, 5, 63, 64, 65, 150, 5000]), min_size=1, max_size=3))
    trainers = draw(st.integers(1, 5))
    pushes = st.lists(push(counts), min_size=trainers, max_size=trainers)
    return counts, draw(st.lists(pushes, min_size=1, max_size=3))


def firsts(counts: Sequence[int]) -> NDArray[np.int64]:
    return np.cumsum([0, *counts])


def spread(update: Update, offsets_E: NDArray[np.int64]) -> Array:
    """Zeros written out, all tensors one behind the other."""
    if isinstance(update, DenseUpdate):
        return np.concatenate(update.values)
    spread_N = np.zeros(offsets_E[-1], np.float32)
    spread_N[places(update, offsets_E)] = update.values_K
    return spread_N


def places(update: Update, offsets_E: NDArray[np.int64]) -> NDArray[np.int64]:
    if isinstance(update, DenseUpdate):
        return np.arange(offsets_E[-1])
    return update.indices_K + np.repeat(offsets_E[:-1], np.diff(update.offsets_E))


def mean_of(mean: Mean, count: int) -> Array:
    spread_N = np.zeros(count, np.float32)
    spread_N[slice(None) if mean.indices_K is None else mean.indices_K] = mean.values_K
    return spread_N


@given(steps_of_pushes())
def test_parts_have_the_mean_of_the_whole_bit_for_bit(drawn: tuple[list[int], list[list[Update]]]):
    counts, steps = drawn
    offsets_E = firsts(counts)
    aggregate = Aggregate(offsets_E)
    with np.errstate(over="ignore", invalid="ignore"):
        for pushes in steps:
            mean = aggregate.mean(pushes)
            total, *others = (spread(one, offsets_E) for one in pushes)
            for other in others:
                total = total + other
            expected = total / np.float32(len(pushes))
            # A sum of parts begins with 0, so it is never -0.
            is_full = all(isinstance(one, DenseUpdate) for one in pushes)
            found = mean_of(mean, offsets_E[-1])
            assert (found if is_full else found + 0).tobytes() == (
                expected if is_full else expected + 0
            ).tobytes()
            assert mean.is_finite == bool(np.isfinite(expected).all())
            assert (mean.indices_K is None) == is_full
            if mean.indices_K is not None:
                union = np.unique(np.concatenate([places(one, offsets_E) for one in pushes]))
                assert mean.indices_K.tolist() == union.tolist()


def parts(indices: list[int], values: list[float]) -> Elements:
    offsets_E = np.array([0, len(indices)])
    return Elements(offsets_E, np.array(indices, np.int32), np.array(values, np.float32))


def whole(values_N: Array, unit: float | None = None) -> DenseUpdate:
    return DenseUpdate([values_N], [unit])


def test_a_unit_that_all_share_is_that_of_the_mean():
    ones = [whole(np.float32([unit, 0]), unit) for unit in (0.5, 0.5, 0.75)]
    assert Aggregate(firsts([2])).mean(ones[:2]).units == [0.5]
    assert Aggregate(firsts([2])).mean(ones).units == [None]


def test_a_value_that_is_not_finite_is_told():
    for bad in (np.inf, np.nan):
        for push in (parts([2, 70], [bad, 1.0]), whole(np.float32([bad] + 99 * [0]))):
            assert not Aggregate(firsts([100])).mean([push, parts([3], [1.0])]).is_finite


def test_a_gradient_at_an_odd_address_is_read():
    payload = memoryview(b"?" + np.float32([1, 2, 3]).tobytes())[1:]
    pushes = [whole(np.frombuffer(payload, np.float32)), whole(np.float32([3, 2, 1]))]
    assert Aggregate(firsts([3])).mean(pushes).values_K.tolist() == [2, 2, 2]
