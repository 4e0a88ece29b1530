"""The rows' thresholds against a sort."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from dlrm_hybrid.kernels.rows import decode_rows, decode_rows_of_halves, encode_rows, gather

Float32s = NDArray[np.float32]
SUBNORMAL = np.float32(1e-45)
LARGEST = np.finfo(np.float32).max


def run(x_BN: Float32s, keep: int) -> tuple[int, NDArray[np.int32], Float32s, Float32s]:
    """Count, indices, values and thresholds."""
    indices_K = np.full(x_BN.size, -7, np.int32)
    values_K = np.full(x_BN.size, -7, np.float32)
    tau_B = np.full(x_BN.shape[0], -7, np.float32)
    count = encode_rows(x_BN.ctypes.data, *x_BN.shape, keep, indices_K, values_K, tau_B)
    return count, indices_K[: max(count, 0)], values_K[: max(count, 0)], tau_B


def check(x_BN: Float32s, keep: int) -> None:
    count, indices_K, values_K, tau_B = run(x_BN, keep)
    expected_B = np.sort(np.abs(x_BN), axis=1)[:, x_BN.shape[1] - keep]
    assert tau_B.tobytes() == expected_B.tobytes()
    kept_BN = (np.abs(x_BN) >= expected_B[:, None]) & (x_BN != 0)
    assert count == kept_BN.sum()
    np.testing.assert_array_equal(indices_K, np.flatnonzero(kept_BN))
    assert values_K.tobytes() == x_BN[kept_BN].tobytes()
    out_N = np.full(x_BN.size, np.nan, np.float32)
    decode_rows(indices_K, values_K, out_N.ctypes.data, out_N.size)
    assert out_N.tobytes() == np.where(kept_BN, x_BN, np.float32(0)).tobytes()


ELEMENTS = st.one_of(
    st.floats(-8, 8, width=32),
    st.sampled_from([0.0, -0.0, 1.0, -1.0, SUBNORMAL, -SUBNORMAL, LARGEST, -LARGEST]),
    st.integers(0x3F800000, 0x3F800004).map(lambda bits: np.uint32(bits).view(np.float32)),
)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Float32s, int]:
    width = draw(st.sampled_from([1, 2, 7, 63, 64, 65, 128, 200]))
    x_BN = draw(arrays(np.float32, (draw(st.integers(1, 3)), width), elements=ELEMENTS))
    return x_BN, draw(st.integers(1, width))


@given(cases())
def test_the_kept_are_those_of_a_sort(case: tuple[Float32s, int]) -> None:
    check(*case)


@pytest.mark.parametrize("width", [13, 256, 300])
@pytest.mark.parametrize("rectified", [False, True])
def test_every_rank_of_random_rows(width: int, rectified: bool) -> None:
    x_BN = np.random.default_rng(width).normal(size=(4, width)).astype(np.float32)
    for keep in range(1, width + 1):
        check(np.maximum(x_BN, 0) if rectified else x_BN, keep)


def test_equal_magnitudes_are_all_kept() -> None:
    x_BN = np.array([[1, -2, 2, 2, 0, -1], [3, 3, 3, 3, 3, -3]], np.float32)
    count, indices_K, values_K, tau_B = run(x_BN, 2)
    assert tau_B.tolist() == [2, 3]
    assert indices_K.tolist() == [1, 2, 3, 6, 7, 8, 9, 10, 11]
    assert values_K.tolist() == [-2, 2, 2, 3, 3, 3, 3, 3, -3]
    assert count == 9


def test_a_row_of_zeros_keeps_nothing() -> None:
    x_BN = np.zeros((3, 70), np.float32)
    x_BN[1, 69] = 5
    count, indices_K, _, tau_B = run(x_BN, 4)
    assert (count, indices_K.tolist(), tau_B.tolist()) == (1, [139], [0, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("position", [0, 63, 64, 129])
@pytest.mark.parametrize("keep", [1, 130])
def test_a_value_that_is_not_finite_is_seen(bad: float, position: int, keep: int) -> None:
    x_BN = np.full((3, 130), LARGEST)
    assert run(x_BN, keep)[0] == 390
    x_BN[2, position] = bad
    assert run(x_BN, keep)[0] == -1


@given(arrays(np.float32, st.integers(0, 100), elements=st.floats(width=32)), st.data())
def test_gathered_values_are_those_at_the_places(x_N: Float32s, data: st.DataObject) -> None:
    taken_N = data.draw(arrays(np.bool_, x_N.size))
    indices_K = np.flatnonzero(taken_N).astype(np.int32)
    out_K = np.empty(indices_K.size, np.float32)
    gather(x_N.ctypes.data, x_N.size, indices_K, out_K)
    assert out_K.tobytes() == x_N[taken_N].tobytes()


def test_halves_are_placed_as_the_floats_that_they_begin() -> None:
    words_K = np.random.default_rng(1).integers(0, 2**32, 7, dtype=np.uint32)
    halves = (words_K >> 16).astype("<u2").view(np.uint8)
    indices_K = np.array([0, 3, 4, 9, 10, 11, 19], np.int32)
    out_N, expected_N = np.full(20, np.nan, np.float32), np.zeros(20, np.uint32)
    decode_rows_of_halves(indices_K, halves, out_N.ctypes.data, out_N.size)
    expected_N[indices_K] = words_K & 0xFFFF0000
    assert out_N.tobytes() == expected_N.tobytes()
