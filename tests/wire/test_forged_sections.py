"""Any payload gives rising indices in range and as many values, or an error; never a crash."""

import ctypes
import mmap
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutated_bytes import COUNT, MOST_BYTES, SHAPE, changed, memory_of, sparse_sections

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import decode_sparse, rows_of, sparse_of

NO_ACCESS = 0
SPARSE = (Encoding.INDEX32, Encoding.BITMAP, Encoding.RICE, Encoding.ROWS)


def section(encoding: Encoding, count: int, payload: bytes) -> Section:
    return Section(6, encoding, Dtype.FLOAT32, count, payload)


def index32(*indices: int, count: int = 9) -> Section:
    payload = np.array(indices, np.int32).tobytes() + bytes(4 * len(indices))
    return section(Encoding.INDEX32, count, payload)


def rice(head: int, *rest: bytes, count: int = 9) -> Section:
    return section(Encoding.RICE, count, struct.pack("<I", head) + b"".join(rest))


NO_INT32 = Section(6, Encoding.INDEX32, Dtype.INT32, 9, b"?" * 8)


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (index32(3, 3), "indices do not increase from 0 to 8"),
        (index32(4, 3), "indices do not increase"),
        (index32(3, 9), "indices do not increase"),
        (index32(-1, 3), "indices do not increase"),
        (index32(0, count=0), "8 bytes hold no choice of 0 elements"),
        (index32(0, count=2**32 - 1), "it holds 4294967295 elements of float32"),
        (section(Encoding.INDEX32, 9, b"?" * 9), "9 bytes hold no choice of 9 elements"),
        (NO_INT32, "it holds 9 elements of int32"),
        (section(Encoding.BITMAP, 9, b""), "0 bytes hold no choice"),
        (section(Encoding.BITMAP, 9, b"\x01\0\0\0\0"), "5 bytes hold no choice"),
        (section(Encoding.BITMAP, 9, b"\x01\0\0\0"), "the bitmap does not choose as many"),
        (section(Encoding.BITMAP, 9, bytes(8)), "the bitmap does not choose as many"),
        (section(Encoding.BITMAP, 9, b"\0\x02" + bytes(6)), "the bitmap does not choose as many"),
        (section(Encoding.BITMAP, 9, bytes(400)), "400 bytes hold no choice"),
        (section(Encoding.RICE, 9, b"\0\0\0"), "3 bytes hold no choice"),
        (rice(1), "4 bytes hold no choice"),
        (rice(10, bytes(48)), "52 bytes hold no choice"),
        (rice(1, bytes(4)), "the gaps are not those of indices below 9"),
        (rice(1, bytes(12)), "the gaps are not those of indices below 9"),
        (rice(1, b"\xff\x01\0\0", bytes(4)), "the gaps are not those of indices below 9"),
        (rice(1, b"\xff" * 4, bytes(4)), "the gaps are not those of indices below 9"),
        (section(Encoding.ROWS, 9, bytes(9)), "only the shape of its matrix says"),
        (section(Encoding.TERNARY, 9, bytes(9)), "its elements are not listed"),
    ],
)
def test_a_forged_payload_is_named(forged: Section, reason: str) -> None:
    with pytest.raises(DlrmError) as caught:
        sparse_of(forged)
    start = f"tensor 6: no {forged.encoding.name} section: {reason}"
    assert str(caught.value).startswith(start)


def test_the_forged_one_of_many_is_told() -> None:
    good, bad = index32(3, 4), rice(1, b"\xff" * 4, bytes(4))
    with pytest.raises(DlrmError, match="tensor 6: no RICE section: the gaps"):
        decode_sparse([good, good, bad, good])
    other = Section(7, Encoding.INDEX32, Dtype.BFLOAT16, 9, bytes(6))
    with pytest.raises(DlrmError, match="tensor 7: .* it holds bfloat16, others float32"):
        decode_sparse([good, other])


@pytest.mark.parametrize(
    ("shape", "payload", "reason"),
    [
        ((3, 3), b"\0\0", "2 bytes hold no choice of 9 elements"),
        ((3, 3), b"\0\0\0\0\0", "5 bytes hold no choice"),
        ((3, 3), b"\x01\0\0\x01" + bytes(3), "7 bytes hold no choice"),
        ((3, 3), b"\x01\0\0\x03" + bytes(4), "columns do not increase inside their rows"),
        ((3, 3), b"\0\x02\0\x01\x01" + bytes(11), "columns do not increase inside their rows"),
        ((3, 3), b"\xff\xff\xff" + bytes(5), "8 bytes hold no choice"),
        ((2, 4), bytes(4), "9 elements are no matrix of 2 × 4"),
    ],
)
def test_forged_rows_are_told(shape: tuple[int, int], payload: bytes, reason: str) -> None:
    with pytest.raises(DlrmError) as caught:
        rows_of(section(Encoding.ROWS, 9, payload), shape)
    assert str(caught.value).startswith(f"tensor 6: no ROWS section: {reason}")


@st.composite
def forged_sections(draw: st.DrawFn) -> Section:
    """A section with a changed payload, sometimes of another count or encoding."""
    one = sparse_sections()[draw(st.integers(0, len(sparse_sections()) - 1))]
    counts = (0, 1, 7, COUNT - 1, COUNT + 1, 2**31 - 1, 2**31, 2**32 - 1)
    count = draw(st.sampled_from((COUNT,) * 9 + counts))
    encoding = draw(st.sampled_from((one.encoding,) * 12 + SPARSE))
    return Section(6, encoding, one.dtype, count, draw(changed(bytes(one.payload))))


def accepted(one: Section) -> bool:
    """Whether the section is read; what is read is a choice of its elements."""
    try:
        if one.count == COUNT:
            indices, values = rows_of(one, SHAPE)
        else:
            found = sparse_of(one)
            indices, values = found.indices_K, found.values_K
    except DlrmError:
        return False
    assert indices.size == values.size
    if indices.size:
        assert indices[0] >= 0 and indices[-1] < one.count
        assert (np.diff(indices) > 0).all()
    return True


def test_genuine_sections_are_read() -> None:
    found = sparse_sections()
    assert {one.encoding for one in found} == set(SPARSE)
    assert all(accepted(one) for one in found)


@given(forged_sections())
def test_a_forged_payload_is_read_or_refused_and_costs_little_memory(one: Section) -> None:
    accepted(one)  # loading a kernel takes memory of its own
    assert memory_of(lambda: accepted(one)) < MOST_BYTES + 8 * len(one.payload)


@pytest.fixture(scope="module")
def fenced() -> memoryview:
    """Memory that ends where a page begins that nobody may read."""
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 8 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    last = ctypes.c_void_p(start + 7 * page)
    assert libc.mprotect(last, ctypes.c_size_t(page), NO_ACCESS) == 0
    return memoryview(memory)[: 7 * page]


@given(forged_sections())
def test_nothing_is_read_behind_the_end_of_a_payload(fenced: memoryview, one: Section) -> None:
    placed = fenced[len(fenced) - len(one.payload) :]
    placed[:] = one.payload
    accepted(Section(one.tensor, one.encoding, one.dtype, one.count, placed))
