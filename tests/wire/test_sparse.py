"""Every choice of elements comes back bit for bit, from the smallest encoding there is."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind, decode, encode
from dlrm_hybrid.wire.section import ELEMENT_BYTES, FLOATS, Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import Sparse, sparse, sparse_of
from dlrm_hybrid.wire.values import narrow

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


def assert_same(found: Sparse, indices: Int32s, values: NDArray[np.float32]) -> None:
    assert found.indices_K.dtype == np.int32 and found.values_K.dtype == np.float32
    assert found.indices_K.tolist() == indices.tolist()
    assert found.values_K.view(np.uint32).tolist() == values.view(np.uint32).tolist()


@given(elements(), DTYPES)
def test_elements_come_back(chosen: tuple[int, Int32s], dtype: Dtype) -> None:
    count, indices = chosen
    values = values_for(indices, dtype)
    section = sparse(9, count, indices, values, dtype)
    assert (section.tensor, section.dtype, section.count) == (9, dtype, count)
    found = sparse_of(section)
    assert_same(found, indices, values)
    assert found.whole == (indices.size == count)
    assert found.values_K.flags.writeable


@given(st.lists(elements(), max_size=3), DTYPES, st.integers(0, 7))
def test_they_come_back_through_a_frame_at_any_address(
    tensors: list[tuple[int, Int32s]], dtype: Dtype, shift: int
) -> None:
    frame = Frame(
        kind=Kind.PUSH,
        sender=1,
        attempt=0,
        step=2,
        boundary=0,
        microbatch=0,
        sections=tuple(
            sparse(number, count, indices, values_for(indices, dtype), dtype)
            for number, (count, indices) in enumerate(tensors)
        ),
    )
    buffer = memoryview(bytes(shift) + encode(frame))[shift:]
    for section, (_, indices) in zip(decode(buffer).sections, tensors, strict=True):
        assert_same(sparse_of(section), indices, values_for(indices, dtype))


@given(elements(), DTYPES)
def test_no_encoding_that_could_be_had_is_smaller(chosen: tuple[int, Int32s], dtype: Dtype) -> None:
    count, indices = chosen
    section = sparse(0, count, indices, values_for(indices, dtype), dtype)
    item_bytes = ELEMENT_BYTES[dtype]
    bitmap_bytes = -(-count // (8 * item_bytes)) * item_bytes
    others = [4 * indices.size, bitmap_bytes] + [0] * (indices.size == count)
    assert len(section.payload) - item_bytes * indices.size <= min(others)


@pytest.mark.parametrize(
    ("count", "indices", "encoding", "num_bytes"),
    [
        (0, [], Encoding.DENSE, 0),
        (1, [0], Encoding.DENSE, 4),
        (1, [], Encoding.INDEX32, 0),
        (10**6, [], Encoding.INDEX32, 0),
        (10**6, [123_456], Encoding.INDEX32, 8),
        (100, range(0, 100, 2), Encoding.BITMAP, 216),
        (100, range(1, 100), Encoding.BITMAP, 412),
        (100, range(100), Encoding.DENSE, 400),
    ],
)
def test_the_choice_is_known(
    count: int, indices: list[int], encoding: Encoding, num_bytes: int
) -> None:
    array = np.array(indices, np.int32)
    section = sparse(0, count, array, np.ones(array.size, np.float32), Dtype.FLOAT32)
    assert (section.encoding, len(section.payload)) == (encoding, num_bytes)


def test_bytes_lie_as_documented() -> None:
    values = np.array([1, -2], np.float32)
    few = sparse(0, 1000, np.array([5, 700], np.int32), values, Dtype.BFLOAT16)
    assert bytes(few.payload).hex(" ", 4) == "05000000 bc020000 803f00c0"
    many = sparse(0, 9, np.array([1, 8], np.int32), values, Dtype.FLOAT32)
    assert bytes(many.payload).hex(" ", 4) == "02010000 0000803f 000000c0"


@pytest.mark.parametrize("indices", [[3, 3], [4, 3], [-1, 3], [3, 9]])
def test_indices_out_of_order_are_not_written_as_a_bitmap(indices: list[int]) -> None:
    with pytest.raises(ValueError, match="tensor 6: indices do not rise from 0 to 8"):
        sparse(6, 9, np.array(indices, np.int32), np.ones(2, np.float32), Dtype.FLOAT32)


def section(encoding: Encoding, dtype: Dtype, count: int, payload: bytes) -> Section:
    return Section(6, encoding, dtype, count, payload)


def index32(*indices: int, count: int = 9) -> Section:
    payload = np.array(indices, np.int32).tobytes() + bytes(4 * len(indices))
    return section(Encoding.INDEX32, Dtype.FLOAT32, count, payload)


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (index32(3, 3), "indices do not rise from 0 to 8"),
        (index32(4, 3), "indices do not rise"),
        (index32(3, 9), "indices do not rise"),
        (index32(-1, 3), "indices do not rise"),
        (index32(0, count=0), "8 bytes hold no 0 elements"),
        (index32(0, count=2**32 - 1), "4294967295 elements of float32"),
        (section(Encoding.INDEX32, Dtype.FLOAT32, 9, b"?" * 9), "9 bytes hold no 9 elements"),
        (section(Encoding.INDEX32, Dtype.INT32, 9, b"?" * 8), "9 elements of int32"),
        (section(Encoding.BITMAP, Dtype.FLOAT32, 9, b""), "0 bytes hold no 9 elements"),
        (section(Encoding.BITMAP, Dtype.FLOAT32, 9, b"\x01\0\0\0\0"), "5 bytes hold no"),
        (section(Encoding.BITMAP, Dtype.FLOAT32, 9, b"\x01\0\0\0"), "does not choose 0 of 9"),
        (section(Encoding.BITMAP, Dtype.FLOAT32, 9, bytes(8)), "does not choose 1 of 9"),
        (section(Encoding.BITMAP, Dtype.FLOAT32, 9, b"\0\x02" + bytes(6)), "choose 1 of 9"),
        (section(Encoding.BITMAP, Dtype.FLOAT32, 9, bytes(400)), "400 bytes hold no 9"),
    ],
)
def test_a_forged_payload_is_told(forged: Section, reason: str) -> None:
    with pytest.raises(DlrmError, match=f"tensor 6: no {forged.encoding.name} section: .*{reason}"):
        sparse_of(forged)
