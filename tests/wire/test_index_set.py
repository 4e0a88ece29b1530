"""Sets of indices as sections, and any other bytes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Dtype, Section, SectionError
from dlrm_hybrid.wire.sparse import index_set, index_set_of


@given(st.integers(0, 5000), st.data())
def test_a_set_comes_back(count: int, data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.integers(0, count - 1), max_size=200) if count else st.just(()))
    indices_K = np.array(sorted(chosen), np.int32)
    section = index_set(indices_K, count)
    found_K = index_set_of([section], count)
    assert found_K.dtype == np.int32
    np.testing.assert_array_equal(found_K, indices_K)


@pytest.mark.parametrize("density", [0.1, 0.01, 0.001])
def test_random_indices_take_little_more_than_their_entropy(density: float) -> None:
    count = 1_000_000
    chosen = np.random.default_rng(3).choice(count, int(count * density), replace=False)
    indices_K = np.sort(chosen).astype(np.int32)
    bits = 8 * len(index_set(indices_K, count).payload)
    rest = 1 - density
    entropy = -count * (density * math.log2(density) + rest * math.log2(rest))
    assert 0.99 * entropy < bits < 1.06 * entropy


@pytest.mark.parametrize("indices", [[3, 3], [4, 2], [-1, 2], [0, 10]])
def test_what_does_not_rise_inside_the_vector_is_refused(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="do not increase from 0 to 9"):
        index_set(np.array(indices, np.int32), 10)


@given(st.binary(max_size=40), st.integers(0, 300))
def test_any_bytes_give_a_set_or_an_error(payload: bytes, count: int) -> None:
    section = dense(0, np.frombuffer(payload, np.uint8))
    try:
        indices_K = index_set_of([section], count)
    except SectionError:
        return
    assert index_set(indices_K, count).payload.nbytes == len(payload)


def test_other_sections_are_no_sets() -> None:
    section = index_set(np.array([1, 5], np.int32), 10)
    with pytest.raises(SectionError, match="hold no set of 10 elements"):
        index_set_of([section._replace(payload=b"")], 10)
    with pytest.raises(SectionError, match="float32 is no set"):
        index_set_of([Section(0, section.encoding, Dtype.FLOAT32, 0, b"")], 10)
