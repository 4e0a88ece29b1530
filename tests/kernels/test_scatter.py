"""A server's sums, marks and pulls against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.kernels.residual import return_rounding_error
from dlrm_hybrid.kernels.scatter import (
    collect,
    gather,
    publish,
    put,
    put_all,
    round_bfloat16,
    scatter_add,
)
from dlrm_hybrid.kernels.sections import scatter_bfloat16, widen

Push = tuple[NDArray[np.int32], NDArray[np.float32]]


@st.composite
def pushes(draw: st.DrawFn) -> tuple[int, list[Push]]:
    count = draw(st.sampled_from([1, 63, 64, 65, 300]))
    made: list[Push] = []
    for _ in range(draw(st.integers(0, 3))):
        chosen = draw(st.sets(st.integers(0, count - 1), max_size=20))
        values = draw(
            st.lists(st.floats(-4, 4, width=32), min_size=len(chosen), max_size=len(chosen))
        )
        made.append((np.array(sorted(chosen), np.int32), np.array(values, np.float32)))
    return count, made


@given(pushes())
def test_what_was_added_is_listed_and_taken(case: tuple[int, list[Push]]) -> None:
    count, made = case
    sum_N, touched_W = np.zeros(count, np.float32), np.zeros((count + 63) // 64, np.uint64)
    expected_N = np.zeros(count, np.float32)
    # The elements are those of two tensors.
    offsets_E = np.array([0, count // 3, count])
    for flat_K, values_K in made:
        splits_E = np.searchsorted(flat_K, offsets_E)
        starts_K = np.repeat(offsets_E[:-1], np.diff(splits_E))
        indices_K = (flat_K - starts_K).astype(np.int32)
        scatter_add(offsets_E, splits_E, indices_K, values_K, sum_N, touched_W)
        indices_K = flat_K
        expected_N[indices_K] += values_K
    assert sum_N.tobytes() == expected_N.tobytes()

    indices_N, means_N = np.empty(count, np.int32), np.empty(count, np.float32)
    trainers = max(len(made), 1)
    expected_N /= np.float32(trainers)
    found, is_finite = collect(touched_W, sum_N, trainers, indices_N, means_N)
    assert is_finite
    union_K, taken_K = indices_N[:found], means_N[:found]
    assert union_K.tolist() == sorted({int(index) for indices_K, _ in made for index in indices_K})
    assert not touched_W.any()

    assert taken_K.tobytes() == expected_N[union_K].tobytes()
    assert not sum_N.any()

    out_N = np.full(count, 9, np.float32)
    put(union_K, taken_K, out_N)
    expected_N[np.setdiff1d(np.arange(count), union_K)] = 9
    assert out_N.tobytes() == expected_N.tobytes()
    back_K = np.empty_like(taken_K)
    gather(union_K, out_N, back_K)
    assert back_K.tobytes() == taken_K.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, 3e38])
def test_a_mean_that_is_not_finite_is_noticed(value: float) -> None:
    sum_1, touched_1 = np.zeros(1, np.float32), np.zeros(1, np.uint64)
    for _ in range(2):
        splits_2, values_1 = np.array([0, 1]), np.float32([value])
        scatter_add(splits_2, splits_2, np.zeros(1, np.int32), values_1, sum_1, touched_1)
    found, is_finite = collect(touched_1, sum_1, 2, np.empty(1, np.int32), np.empty(1, np.float32))
    assert (found, is_finite) == (1, False)


@pytest.mark.parametrize("adds", [False, True])
def test_elements_of_tensors_anywhere_are_overwritten_or_added_to(adds: bool) -> None:
    copies = [np.full(size, 9, np.float32) for size in (3, 1, 4)]
    addresses_T = np.array([one.ctypes.data for one in copies], np.uint64)
    indices_K, values_K = np.array([0, 2, 1, 3], np.int32), np.float32([1, 2, 3, 4])
    put_all(addresses_T, np.array([3, 1, 4]), np.array([0, 2, 2, 4]), indices_K, values_K, adds)
    old = 9 if adds else 0
    expected = [[old + 1, 9, old + 2], [9], [9, old + 3, 9, old + 4]]
    assert [one.tolist() for one in copies] == expected


def test_what_rounding_took_is_given_back() -> None:
    indices_K = np.array([0, 2, 5, 1, 3], np.int32)
    values_K = np.array([1.25, 1e-9, -3, -1e-9, 2.5], np.float32)
    rounded_K = np.array([1, 0, -3, 0, 2], np.float32)
    residual_N = np.full(10, 9, np.float32)
    splits_E = np.array([0, 3, 3, 5])
    offsets_E = np.array([0, 6, 6, 10])
    return_rounding_error(offsets_E, splits_E, indices_K, values_K, rounded_K, residual_N, False)
    tiny = np.float32(1e-9)
    assert residual_N.tolist() == [0.25, 9, tiny, 9, 9, 0, 9, -tiny, 9, 0.5]
    assert splits_E.tolist() == [0, 2, 2, 3]
    assert (indices_K[:3].tolist(), rounded_K[:3].tolist()) == ([0, 5, 3], [1, -3, 2])


def test_rounding_on_the_way_is_rounding_before() -> None:
    offsets_E = np.array([0, 40, 50])
    values_K = np.random.default_rng(3).normal(size=20).astype(np.float32)
    values_K[3] = 1e-45  # half of the smallest bfloat16 and less: becomes zero and stays
    rounded_K, outcomes = np.empty_like(values_K), []
    round_bfloat16(values_K.view(np.uint32), rounded_K.view(np.uint32))
    assert (rounded_K != values_K).any()
    for rounds in (False, True):
        out_K = np.full_like(values_K, 7) if rounds else rounded_K.copy()
        indices_K = np.r_[0:30:2, 1:10:2].astype(np.int32)
        splits_E, residual_N = np.array([0, 15, 20]), np.zeros(50, np.float32)
        return_rounding_error(offsets_E, splits_E, indices_K, values_K, out_K, residual_N, rounds)
        kept = splits_E[-1]
        outcomes.append([splits_E, indices_K[:kept], out_K[:kept], residual_N])
    for before, by_the_way in zip(*outcomes, strict=True):
        assert before.tobytes() == by_the_way.tobytes()
    assert outcomes[0][0].tolist() == [0, 14, 19]


def test_a_copy_approaches_by_rounded_differences() -> None:
    rng = np.random.default_rng(4)
    value_K, out_N = rng.normal(size=9).astype(np.float32), rng.normal(size=30).astype(np.float32)
    flat_K = np.sort(rng.choice(30, 9, replace=False)).astype(np.int32)
    expected_N, sent_K, rounded_K = out_N.copy(), np.empty(9, np.float32), np.empty(9, np.float32)
    difference_K = value_K - out_N[flat_K]
    round_bfloat16(difference_K.view(np.uint32), rounded_K.view(np.uint32))
    assert (rounded_K != difference_K).any()
    expected_N[flat_K] += rounded_K
    publish(flat_K, value_K, out_N, sent_K)
    assert (sent_K.tobytes(), out_N.tobytes()) == (rounded_K.tobytes(), expected_N.tobytes())


def test_bfloat16_are_scattered_as_if_widened_first() -> None:
    rng = np.random.default_rng(3)
    data = np.frombuffer(rng.bytes(2 * 37), np.uint8)
    indices_K = np.sort(rng.choice(300, 37, replace=False)).astype(np.int32)
    values_K, expected_N = np.empty(37, np.float32), np.zeros(300, np.float32)
    widen(data, values_K.view(np.uint8))
    put(indices_K, values_K, expected_N)
    assert expected_N.any()

    found_N = np.full(300, 7, np.float32)
    scatter_bfloat16(indices_K, data, found_N.ctypes.data, found_N.size)
    assert found_N.tobytes() == expected_N.tobytes()
