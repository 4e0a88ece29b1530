"""Every choice of elements comes back bit for bit, from the smallest encoding there is."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode
from dlrm_hybrid.wire.section import ELEMENT_BYTES, FLOATS, Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import (
    Elements,
    decode_sparse,
    encode_sparse,
    rows,
    rows_of,
    sparse,
    sparse_of,
)

Int32s = NDArray[np.int32]
DTYPES = st.sampled_from(sorted(FLOATS))


@st.composite
def elements(draw: st.DrawFn) -> tuple[int, Int32s]:
    """Some of the indices below a count: few, many, or in clusters."""
    count = draw(st.integers(0, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chance = draw(st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.5, 0.9, 1.0]))
    chosen = rng.random(count) < chance
    if draw(st.booleans()):
        chosen &= np.sin(np.arange(count) / 50) > 0.7
    return count, np.flatnonzero(chosen).astype(np.int32)


def values_for(indices: Int32s, dtype: Dtype) -> NDArray[np.float32]:
    values = np.random.default_rng(indices.size).standard_normal(indices.size)
    return narrow(values.astype(np.float32), dtype)


def assert_same(
    found: Elements | tuple[Int32s, NDArray[np.float32]],
    indices: Int32s,
    values: NDArray[np.float32],
) -> None:
    *_, indices_K, values_K = found
    assert indices_K.dtype == np.int32 and values_K.dtype == np.float32
    assert indices_K.tolist() == indices.tolist()
    assert values_K.view(np.uint32).tolist() == values.view(np.uint32).tolist()


@given(elements(), DTYPES)
def test_elements_come_back(chosen: tuple[int, Int32s], dtype: Dtype) -> None:
    count, indices = chosen
    values = values_for(indices, dtype)
    section = sparse(9, count, indices, values, dtype)
    assert (section.tensor, section.dtype, section.count) == (9, dtype, count)
    found = sparse_of(section)
    assert_same(found, indices, values)
    assert found.values_K.flags.writeable


@given(st.lists(elements(), max_size=3), DTYPES, st.integers(0, 7))
def test_they_come_back_through_a_frame_at_any_address(
    tensors: list[tuple[int, Int32s]], dtype: Dtype, shift: int
) -> None:
    frame = Frame(
        kind=Kind.PUSH,
        sender=1,
        attempt=0,
        number=2,
        sections=tuple(
            sparse(number, count, indices, values_for(indices, dtype), dtype)
            for number, (count, indices) in enumerate(tensors)
        ),
    )
    buffer = memoryview(bytes(shift) + encode(frame))[shift:]
    for section, (_, indices) in zip(decode(buffer).sections, tensors, strict=True):
        assert_same(sparse_of(section), indices, values_for(indices, dtype))


@given(st.lists(elements(), max_size=5), DTYPES)
def test_many_tensors_give_the_sections_of_each(
    tensors: list[tuple[int, Int32s]], dtype: Dtype
) -> None:
    given_ = [(indices, values_for(indices, dtype)) for _, indices in tensors]
    sections = encode_sparse(
        range(10, 10 + len(tensors)),
        np.array([count for count, _ in tensors], np.int64),
        np.cumsum([0, *(indices.size for indices, _ in given_)]),
        np.concatenate([np.empty(0, np.int32), *(indices for indices, _ in given_)]),
        np.concatenate([np.empty(0, np.float32), *(values for _, values in given_)]),
        dtype,
    )
    assert sections == [
        sparse(10 + place, count, *given_[place], dtype) for place, (count, _) in enumerate(tensors)
    ]
    found = decode_sparse(sections)
    assert found.offsets_E[0] == 0 and len(found.offsets_E) == len(tensors) + 1
    for (first, last), (indices, values) in zip(pairwise(found.offsets_E), given_, strict=True):
        assert_same((found.indices_K[first:last], found.values_K[first:last]), indices, values)


def index_bytes(section: Section, num_values: int) -> int:
    return len(section.payload) - ELEMENT_BYTES[section.dtype] * num_values


def rice_bits(indices: Int32s, parameter: int) -> int:
    gaps = np.diff(indices.astype(np.int64), prepend=-1) - 1
    ones = gaps >> parameter
    return int(np.where(ones < 24, ones + 1 + parameter, 56).sum())


def sizes(shape: tuple[int, int], indices: Int32s, dtype: Dtype) -> dict[Encoding, int]:
    """Bytes of the indices in every encoding that can hold them, by another way of counting."""
    num_rows, width = shape
    count = num_rows * width
    if indices.size == count:
        return {Encoding.DENSE: 0}
    found = {Encoding.INDEX32: 4 * indices.size, Encoding.BITMAP: (count + 7) // 8}
    if 2 * indices.size <= count:
        fewest = min(rice_bits(indices, parameter) for parameter in range(32))
        found[Encoding.RICE] = 4 + (fewest + 7) // 8
    if width <= 256 and np.bincount(indices // width, minlength=1).max() < 256:
        found[Encoding.ROWS] = num_rows + indices.size
    item_bytes = ELEMENT_BYTES[dtype]
    return {name: -(-size // item_bytes) * item_bytes for name, size in found.items()}


@given(elements(), DTYPES)
def test_the_smallest_encoding_is_chosen(chosen: tuple[int, Int32s], dtype: Dtype) -> None:
    count, indices = chosen
    section = sparse(0, count, indices, values_for(indices, dtype), dtype)
    expected = sizes((1, count), indices, dtype)
    expected.pop(Encoding.ROWS, None)
    assert index_bytes(section, indices.size) == expected[section.encoding]
    assert expected[section.encoding] == min(expected.values())


@st.composite
def matrices(draw: st.DrawFn) -> tuple[tuple[int, int], Int32s]:
    shape = (draw(st.integers(0, 12)), draw(st.sampled_from([1, 2, 7, 64, 255, 256, 257, 300])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    chosen = rng.random(shape) < draw(st.sampled_from([0.0, 0.005, 0.1, 0.4, 0.9, 1.0]))
    if shape[0] and draw(st.booleans()):
        chosen[0] = True
    return shape, np.flatnonzero(chosen).astype(np.int32)


@given(matrices(), DTYPES, st.booleans())
def test_rows_come_back_from_the_smallest_encoding(
    chosen: tuple[tuple[int, int], Int32s], dtype: Dtype, allow_rice: bool
) -> None:
    shape, indices = chosen
    values = values_for(indices, dtype)
    section = rows(9, shape, indices, values, dtype, allow_rice)
    assert (section.tensor, section.dtype, section.count) == (9, dtype, shape[0] * shape[1])
    assert_same(rows_of(section, shape), indices, values)
    expected = sizes(shape, indices, dtype)
    if not allow_rice:
        expected.pop(Encoding.RICE, None)
    assert index_bytes(section, indices.size) == expected[section.encoding]
    assert expected[section.encoding] == min(expected.values())


@pytest.mark.parametrize(
    ("count", "indices", "encoding", "num_bytes"),
    [
        (0, [], Encoding.DENSE, 0),
        (1, [0], Encoding.DENSE, 4),
        (1, [], Encoding.INDEX32, 0),
        (10**6, [], Encoding.INDEX32, 0),
        (10**6, [123_456], Encoding.INDEX32, 8),
        (10**6, range(0, 10**6, 1000), Encoding.RICE, 4 + 4000 + 1376),
        (100, range(0, 100, 2), Encoding.BITMAP, 216),
        (100, range(1, 100), Encoding.BITMAP, 412),
        (100, range(100), Encoding.DENSE, 400),
        (2**31 - 1, [0, 2**31 - 2], Encoding.INDEX32, 16),
        (2**31 - 1, [0, 1, 2, 3, 2**31 - 2], Encoding.RICE, 12 + 20),
    ],
)
def test_the_choice_is_known(
    count: int, indices: list[int], encoding: Encoding, num_bytes: int
) -> None:
    array = np.array(indices, np.int32)
    section = sparse(0, count, array, np.ones(array.size, np.float32), Dtype.FLOAT32)
    assert (section.encoding, len(section.payload)) == (encoding, num_bytes)
    assert sparse_of(section).indices_K.tolist() == list(indices)


def test_bytes_lie_as_documented() -> None:
    two = np.array([1, -2], np.float32)
    one_int = sparse(0, 10**9, np.array([5], np.int32), two[:1], Dtype.BFLOAT16)
    assert bytes(one_int.payload).hex(" ", 2) == "0500 0000 803f"
    bits_ = sparse(0, 9, np.array([1, 8], np.int32), two, Dtype.FLOAT32)
    assert bytes(bits_.payload).hex(" ", 4) == "02010000 0000803f 000000c0"
    # Gaps 7 and 9 with parameter 2: 10 11, then 110 10, read from the lowest bit on.
    gaps = sparse(0, 100, np.array([7, 17], np.int32), two, Dtype.BFLOAT16)
    assert gaps.encoding is Encoding.RICE
    assert bytes(gaps.payload).hex(" ", 2) == "0200 0010 bd00 803f 00c0"
    matrix = rows(0, (3, 256), np.array([1, 767], np.int32), two, Dtype.BFLOAT16, False)
    assert matrix.encoding is Encoding.ROWS
    assert bytes(matrix.payload).hex(" ", 2) == "0100 0101 ff00 803f 00c0"


@pytest.mark.parametrize("count", [9, 1000])
@pytest.mark.parametrize("indices", [[3, 3], [4, 3], [-1, 3], [3, 1000]])
def test_indices_out_of_order_are_not_written(count: int, indices: list[int]) -> None:
    array = np.array(indices, np.int32)
    with pytest.raises(ValueError, match=f"indices do not increase from 0 to {count - 1}"):
        sparse(6, count, array, np.ones(2, np.float32), Dtype.FLOAT32)
    with pytest.raises(ValueError, match=f"indices do not increase from 0 to {count - 1}"):
        rows(6, (1, count), array, np.ones(2, np.float32), Dtype.FLOAT32, False)
    both, ends = np.array([0, *indices], np.int32), np.array([0, 1, 3])
    with pytest.raises(ValueError, match=f"indices do not increase from 0 to {count - 1}"):
        encode_sparse(
            (5, 6), np.array([7, count]), ends, both, np.ones(3, np.float32), Dtype.FLOAT32
        )
