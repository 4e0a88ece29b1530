import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from dlrm_hybrid.compress.gradient.selector import largest

FEW = st.sampled_from([0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1e-45, 3.0])


@given(arrays(np.float32, st.integers(1, 200), elements=FEW), st.data())
def test_the_largest_are_those_of_a_stable_sort(values_N: np.ndarray, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, values_N.size))
    order = np.argsort(-np.abs(values_N), kind="stable")[:count]
    expected_K = np.sort(order[values_N[order] != 0])
    found_K = largest(values_N, count)
    assert found_K.dtype == np.int32
    np.testing.assert_array_equal(found_K, expected_K)


def test_many_elements() -> None:
    values_N = np.random.default_rng(1).standard_t(2, 100_003).astype(np.float32)
    expected_K = np.sort(np.argsort(-np.abs(values_N), kind="stable")[:1000])
    np.testing.assert_array_equal(largest(values_N, 1000), expected_K)
