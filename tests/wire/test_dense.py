"""Arrays come back as they went in, narrower ones rounded to the nearest, ties to even."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense, narrow, pack, packed, unpack, values_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

TORCH = {Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}
NARROW = sorted(TORCH)
VALUE_TYPES = [Dtype.FLOAT32, *NARROW]
LARGEST = {Dtype.BFLOAT16: 0x7F7F0000, Dtype.FLOAT16: 0x477FE000}
WORDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def floats(words: list[int]) -> NDArray[np.float32]:
    return np.array(words, np.uint32).view(np.float32)


def bits(values: NDArray[np.float32]) -> list[int]:
    return values.view(np.uint32).tolist()


def by_torch(values: NDArray[np.float32], dtype: Dtype) -> NDArray[np.float32]:
    """What torch rounds to, with its infinities brought back where the input was finite."""
    rounded = torch.from_numpy(values.copy()).to(TORCH[dtype]).float().numpy()
    largest = np.copysign(floats([LARGEST[dtype]]), values)
    return np.where(np.isinf(rounded) & np.isfinite(values), largest, rounded)


def assert_same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    nan = np.isnan(expected)
    assert np.isnan(found[nan]).all()
    assert bits(found[~nan]) == bits(expected[~nan])


def every_exponent() -> NDArray[np.float32]:
    """Values of all sizes, with those that lie half way between two of either narrow type."""
    rng = np.random.default_rng(0)
    words = rng.integers(0, 2**32, 200_000, dtype=np.uint32)
    words[::4] = words[::4] & 0xFFFF0000 | 0x8000
    words[1::4] = words[1::4] & 0xFFFFE000 | 0x1000
    words[2::4] = words[2::4] & 0x807FFFFF | (words[2::4] >> 23) % 64 + 90 << 23
    words[:6] = 0, 0x80000000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFFFFFFF
    halves_of_float16_steps = np.arange(4097, dtype=np.float32) * np.float32(2.0**-25)
    return np.concatenate([words.view(np.float32), halves_of_float16_steps])


@pytest.mark.parametrize("dtype", NARROW)
def test_rounding_is_that_of_torch_but_stays_finite(dtype: Dtype) -> None:
    values = every_exponent()
    with np.errstate(invalid="ignore"):
        assert_same(narrow(values, dtype), by_torch(values, dtype))


@pytest.mark.parametrize("dtype", NARROW)
@given(words=WORDS)
def test_no_other_value_of_the_type_is_nearer(dtype: Dtype, words: list[int]) -> None:
    values = floats(words)
    values = values[np.isfinite(values)]
    every = torch.arange(2**16).to(torch.uint16).view(TORCH[dtype]).double().numpy()
    every = np.unique(every[np.isfinite(every)])
    place = np.clip(np.searchsorted(every, values), 1, every.size - 1)
    wide = values.astype(np.float64)
    least = np.minimum(np.abs(wide - every[place - 1]), np.abs(wide - every[place]))
    assert (np.abs(narrow(values, dtype).astype(np.float64) - wide) == least).all()


@pytest.mark.parametrize("dtype", VALUE_TYPES)
@given(words=WORDS)
def test_narrowed_values_come_back_bit_for_bit(dtype: Dtype, words: list[int]) -> None:
    values = narrow(floats(words), dtype)
    assert bits(narrow(values, dtype)) == bits(values)
    section = packed(4, values, dtype)
    assert (section.tensor, section.encoding, section.count) == (4, Encoding.DENSE, len(words))
    back = values_of(section)
    assert bits(back) == bits(values)
    assert back.flags.writeable and not np.shares_memory(back, values)


@pytest.mark.parametrize("dtype", NARROW)
def test_bytes_are_those_of_torch(dtype: Dtype) -> None:
    values = narrow(every_exponent(), dtype)
    values = values[~np.isnan(values)]
    expected = torch.from_numpy(values).to(TORCH[dtype]).view(torch.uint8).numpy().tobytes()
    assert bytes(pack(values, dtype)) == expected


def read_only(payload: memoryview) -> NDArray[np.uint8]:
    return np.frombuffer(payload.toreadonly(), np.uint8)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_pattern_of_16_bits_is_read(dtype: Dtype) -> None:
    patterns = np.arange(2**16, dtype=np.uint16)
    expected = torch.from_numpy(patterns).view(TORCH[dtype]).float().numpy()
    assert_same(unpack(read_only(patterns.view(np.uint8).data), dtype), expected)


@pytest.mark.parametrize("dtype", VALUE_TYPES)
def test_odd_addresses_are_read(dtype: Dtype) -> None:
    values = narrow(np.linspace(-1, 1, 9, dtype=np.float32), dtype)
    shifted = memoryview(b"?" + bytes(pack(values, dtype)))[1:]
    assert bits(unpack(read_only(shifted), dtype)) == bits(values)


def test_float32_is_not_copied() -> None:
    values = np.ones(3, np.float32)
    assert narrow(values, Dtype.FLOAT32) is values
    assert np.shares_memory(
        np.frombuffer(packed(0, values, Dtype.FLOAT32).payload, np.float32), values
    )


@pytest.mark.parametrize(
    "section",
    [
        Section(7, Encoding.DENSE, Dtype.INT32, 1, b"abcd"),
        Section(7, Encoding.BITMAP, Dtype.FLOAT32, 1, b"abcd"),
        Section(7, Encoding.DENSE, Dtype.BFLOAT16, 3, b"abcd"),
        Section(7, Encoding.DENSE, Dtype.FLOAT32, 1, b"abcde"),
    ],
)
def test_what_holds_no_values_is_refused(section: Section) -> None:
    with pytest.raises(DlrmError, match="tensor 7: no DENSE section"):
        values_of(section)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (0, 7)])
def test_arrays_return(dtype: type, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)
    section = dense(5, array)
    assert (section.tensor, section.encoding, section.count) == (5, Encoding.DENSE, array.size)
    back = array_of(section)
    assert back.dtype == dtype
    assert np.array_equal(back, array.reshape(-1))


def test_bits_are_kept() -> None:
    bits = np.array([0x7FC00001, 0x80000000, 0xFF800000, 1], np.uint32)
    back = array_of(dense(0, bits.view(np.float32)))
    assert back.view(np.uint32).tolist() == bits.tolist()


def test_a_contiguous_array_is_viewed_and_another_is_copied() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.shares_memory(array_of(dense(0, array)), array)
    assert array_of(dense(0, array.T)).tolist() == [0, 3, 1, 4, 2, 5]


def test_types_without_a_name_on_the_wire_are_refused() -> None:
    with pytest.raises(ValueError, match="tensor 7: no section holds elements of int16"):
        dense(7, np.zeros(2, np.int16))
    with pytest.raises(ValueError, match="tensor 7: numpy has no type for BFLOAT16"):
        array_of(Section(7, Encoding.DENSE, Dtype.BFLOAT16, 1, b"ab"))
    with pytest.raises(ValueError, match="tensor 7: BITMAP is not dense"):
        array_of(Section(7, Encoding.BITMAP, Dtype.FLOAT32, 1, b"abcd"))
