"""Means of ternary values as levels."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.ternary import MAX_TRAINERS, levels, mean_of


def units() -> st.SearchStrategy[float]:
    """Floats of 12 significant bits."""
    return st.builds(math.ldexp, st.integers(2**11, 2**12 - 1), st.integers(-120, 90))


@given(st.integers(1, 70), units(), st.integers(0, 2**32), st.integers(0, 40))
def test_a_mean_summed_in_floats_comes_back(trainers: int, unit: float, seed: int, count: int):
    codes_TN = np.random.default_rng(seed).integers(-1, 2, (trainers, count))
    sum_N = np.zeros(count, np.float32)
    for codes_N in codes_TN:
        sum_N += codes_N.astype(np.float32) * np.float32(unit)
    mean_N = sum_N / np.float32(trainers)
    section = levels(4, mean_N, unit, trainers)
    bits = math.ceil(math.log2(2 * trainers + 1))
    assert len(section.payload) == 8 + math.ceil(count * bits / 8)
    np.testing.assert_array_equal(mean_of(section), mean_N)
    whole_N = codes_TN.sum(axis=0).astype(np.float32) * np.float32(unit)
    np.testing.assert_array_equal(sum_N, whole_N)


@pytest.mark.parametrize(
    ("trainers", "bits"), [(2, 3), (4, 4), (8, 5), (16, 6), (64, 8), (127, 8), (512, 11)]
)
def test_fields_are_as_narrow_as_levels_allow(trainers: int, bits: int) -> None:
    mean_N = np.array([-1, 0, 1] * 10, np.float32)
    section = levels(0, mean_N, 1.0, trainers)
    assert len(section.payload) == 8 + math.ceil(30 * bits / 8)
    np.testing.assert_array_equal(mean_of(section), mean_N)


def test_the_largest_world_adds_up() -> None:
    unit = np.float32(4095 * 2.0**-12)
    mean_N = np.array([MAX_TRAINERS, -MAX_TRAINERS, 1, 4095], np.float32) * unit / MAX_TRAINERS
    np.testing.assert_array_equal(mean_of(levels(0, mean_N, float(unit), MAX_TRAINERS)), mean_N)


def test_nothing_is_a_mean_of_zeros() -> None:
    mean_N = np.zeros(5, np.float32)
    np.testing.assert_array_equal(mean_of(levels(0, mean_N, 0.0, 3)), mean_N)


@pytest.mark.parametrize("value", [0.3, 1.5, math.nan, math.inf])
def test_what_is_no_mean_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="tensor 4: no mean of 2 values"):
        levels(4, np.array([0.5, value], np.float32), 1.0, 2)


@given(st.binary(max_size=24), st.integers(0, 30))
def test_any_bytes_give_a_mean_or_an_error(payload: bytes, count: int) -> None:
    try:
        mean_N = mean_of(Section(0, Encoding.LEVELS, Dtype.FLOAT32, count, payload))
    except SectionError:
        return
    assert np.isfinite(mean_N).all()
    assert mean_N.size == count


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\x00" * 7, "7 bytes are no head"),
        (np.float32(1).tobytes() + b"\x00\x00\x00\x00", "for 0 trainers"),
        (np.float32(-1).tobytes() + b"\x02\x00\x00\x00", "a unit of -1.0"),
        (np.float32(1).tobytes() + b"\x02\x00\x00\x00" + b"\x00", "9 bytes for 3 levels of 3 bits"),
        (np.float32(1).tobytes() + b"\x02\x00\x00\x00" + b"\x05\x00", "a level is above 2"),
        (np.float32(3e38).tobytes() + b"\x02\x00\x00\x00" + b"\x24\x01", "or not finite"),
    ],
)
def test_broken_sections_are_named(payload: bytes, reason: str) -> None:
    with pytest.raises(SectionError, match=f"tensor 7: .*{reason}"):
        mean_of(Section(7, Encoding.LEVELS, Dtype.FLOAT32, 3, payload))
    with pytest.raises(SectionError, match="it holds DENSE"):
        mean_of(Section(7, Encoding.DENSE, Dtype.FLOAT32, 3, payload))
