"""Ternary values, their means as levels, and sets of indices: what comes back, and any bytes."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.kernels.ternary import ternarise
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError
from dlrm_hybrid.wire.sparse import index_set, index_set_of
from dlrm_hybrid.wire.ternary import (
    MAX_TRAINERS,
    Float32s,
    levels,
    mean_of,
    scale_of,
    ternary,
    ternary_of,
)

ENCODINGS = (Encoding.TERNARY, Encoding.TRITS)


def drawn(
    values_N: Float32s, encoding: Encoding, *, limit: float, scale: float, key: int
) -> Section:
    codes_N = np.empty(values_N.size, np.uint8)
    ternarise(values_N, limit, scale, key, codes_N)
    return ternary(3, codes_N, encoding, scale)


def certain(codes: list[int], encoding: Encoding) -> Section:
    """Values of full scale always fire."""
    values_N = np.array(codes, np.float32)
    return drawn(values_N, encoding, limit=1.0, scale=1.0, key=5)


def test_two_bits_lie_as_in_the_golden_vector() -> None:
    section = certain([1, 0, -1, -1, 0], Encoding.TERNARY)
    assert bytes(section.payload) == np.float32(1).tobytes() + bytes([0x06, 0x55])


def test_digits_lie_in_planes() -> None:
    section = certain([1, 0, -1, -1, 0, 1, 1], Encoding.TRITS)  # M = 2 bytes
    # Byte 0 holds elements 0, 2, 4, 6 and one that is not there, byte 1 elements 1, 3, 5.
    expected = [2 + 3 * 0 + 9 * 1 + 27 * 2 + 81 * 1, 1 + 3 * 0 + 9 * 2 + 27 * 1 + 81 * 1]
    assert list(bytes(section.payload)[4:]) == expected


@given(
    st.lists(st.sampled_from([-1, 0, 1]), max_size=60),
    st.sampled_from(ENCODINGS),
    st.sampled_from([0.0, 0.75, 2.0**-130, 3e38]),
)
def test_codes_come_back_times_the_scale(
    codes: list[int], encoding: Encoding, scale: float
) -> None:
    values_N = np.array(codes, np.float32) * np.float32(scale)
    section = drawn(values_N, encoding, limit=scale, scale=scale, key=5)
    per_byte = 4 if encoding is Encoding.TERNARY else 5
    assert len(section.payload) == 4 + math.ceil(len(codes) / per_byte)
    assert scale_of(section) == np.float32(scale)
    np.testing.assert_array_equal(ternary_of(section), values_N)


@pytest.mark.parametrize("count", [1, 9999, 30_011])
def test_both_encodings_draw_the_same_codes(count: int) -> None:
    values_N = np.random.default_rng(1).standard_normal(count).astype(np.float32)
    one, other = (
        ternary_of(drawn(values_N, encoding, limit=2.5, scale=2.5, key=2**62 + 17))
        for encoding in ENCODINGS
    )
    assert set(np.unique(one)) <= {-2.5, 0, 2.5}
    np.testing.assert_array_equal(one, other)


def test_draws_are_unbiased_and_vary_as_they_should() -> None:
    draws, scale, limit = 2000, 2.0, 1.75
    values_N = np.linspace(-2.5, 2.5, 401).astype(np.float32)
    clipped_N = np.clip(values_N, -limit, limit)
    sum_N, squares_N = np.zeros(values_N.size), np.zeros(values_N.size)
    for key in range(draws):
        drawn_N = ternary_of(drawn(values_N, Encoding.TERNARY, limit=limit, scale=scale, key=key))
        sum_N += drawn_N
        squares_N += drawn_N.astype(np.float64) ** 2
    variance_N = scale * np.abs(clipped_N) - clipped_N**2
    error_N = (sum_N / draws - clipped_N) / np.sqrt(np.maximum(variance_N, 1e-12) / draws)
    inside_N = np.abs(clipped_N) > 0
    # Each is normal with deviation 1: of 400 the largest is below 4.5, all together are within 3.
    assert np.abs(error_N[inside_N]).max() < 4.5
    assert abs(error_N[inside_N].mean()) * math.sqrt(inside_N.sum()) < 3
    assert abs((error_N[inside_N] ** 2).mean() - 1) < 3 * math.sqrt(2 / inside_N.sum())
    np.testing.assert_allclose(squares_N / draws, scale * np.abs(clipped_N), atol=0.2)


def test_elements_steps_and_trainers_draw_independently() -> None:
    half_N = np.full(20_000, 0.5, np.float32)

    def fired(key: int) -> np.ndarray:
        return 2 * ternary_of(drawn(half_N, Encoding.TERNARY, limit=1, scale=1, key=key)) - 1

    streams = np.stack([fired(key) for key in (0, 1, 2, 2**32, 2**32 + 1, 2**62)])
    correlations = streams @ streams.T / half_N.size
    off = correlations[~np.eye(len(streams), dtype=bool)]
    assert np.abs(off).max() < 4.5 / math.sqrt(half_N.size)
    for lag in (1, 2, 3, 64, 4096):
        along = (streams[:, :-lag] * streams[:, lag:]).mean(axis=1)
        assert np.abs(along).max() < 4.5 / math.sqrt(half_N.size)


@given(st.binary(max_size=12), st.integers(0, 30), st.sampled_from(ENCODINGS))
def test_any_bytes_give_elements_or_an_error(
    payload: bytes, count: int, encoding: Encoding
) -> None:
    section = Section(0, encoding, Dtype.FLOAT32, count, payload)
    try:
        values_N = ternary_of(section)
    except SectionError:
        return
    scale = scale_of(section)
    assert set(np.abs(values_N)) <= {0.0, scale}
    again = drawn(values_N, encoding, limit=scale, scale=scale, key=0)
    assert scale == 0 or bytes(again.payload)[4:] == payload[4:]


@pytest.mark.parametrize(
    ("encoding", "broken", "reason"),
    [
        (Encoding.TERNARY, b"\x00\x00\x80\x3f\x03", "its codes are not those of 3"),
        (Encoding.TERNARY, b"\x00\x00\x80\x3f\x15", "its codes are not those of 3"),
        (Encoding.TRITS, b"\x00\x00\x80\x3f\xf3", "its codes are not those of 3"),
        (Encoding.TRITS, b"\x00\x00\x80\x3f\x00", "its codes are not those of 3"),
        (Encoding.TRITS, b"\x00\x00\x80\x3f", "4 bytes for 3 elements"),
        (Encoding.TERNARY, b"\x00\x00\xc0\x7f\x55", "its scale is nan"),
        (Encoding.TERNARY, b"\x00\x00\x80\xbf\x55", "its scale is -1.0"),
        (Encoding.DENSE, b"\x00\x00\x80\xbf\x55", "it holds DENSE float32"),
    ],
)
def test_broken_sections_say_what_is_wrong(encoding: Encoding, broken: bytes, reason: str) -> None:
    section = Section(7, encoding, Dtype.FLOAT32, 3, broken)
    with pytest.raises(SectionError, match=f"tensor 7: .*{reason}"):
        ternary_of(section)
    with pytest.raises(SectionError, match="it holds .* float16"):
        scale_of(certain([1], Encoding.TERNARY)._replace(dtype=Dtype.FLOAT16))


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
