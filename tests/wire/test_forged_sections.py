"""Any payload gives rising indices in range and as many values, or an error; never a crash."""

import ctypes
import mmap
import struct
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import FLOATS, Dtype, Encoding, Section
from dlrm_hybrid.wire.sparse import rows, rows_of, sparse, sparse_of, sparse_of_all

SHAPE = (40, 50)
COUNT = SHAPE[0] * SHAPE[1]
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
        (index32(3, 3), "indices do not rise from 0 to 8"),
        (index32(4, 3), "indices do not rise"),
        (index32(3, 9), "indices do not rise"),
        (index32(-1, 3), "indices do not rise"),
        (index32(0, count=0), "8 bytes hold no choice of 0 elements"),
        (index32(0, count=2**32 - 1), "it holds 4294967295 elements of float32"),
        (section(Encoding.INDEX32, 9, b"?" * 9), "9 bytes hold no choice of 9 elements"),
        (NO_INT32, "it holds 9 elements of int32"),
        (section(Encoding.BITMAP, 9, b""), "0 bytes hold no choice"),
        (section(Encoding.BITMAP, 9, b"\x01\0\0\0\0"), "5 bytes hold no choice"),
        (section(Encoding.BITMAP, 9, b"\x01\0\0\0"), "the bitmap does not choose as many"),
        (section(Encoding.BITMAP, 9, bytes(8)), "the bitmap does not choose as many"),
        (
            section(Encoding.BITMAP, 9, b"\0\x02" + bytes(6)),
            "the bitmap does not choose as many",
        ),
        (section(Encoding.BITMAP, 9, bytes(400)), "400 bytes hold no choice"),
        (section(Encoding.RICE, 9, b"\0\0\0"), "3 bytes hold no choice"),
        (rice(1), "4 bytes hold no choice"),
        (rice(10, bytes(48)), "52 bytes hold no choice"),
        (rice(1, bytes(4)), "the gaps are not those of indices below 9"),
        (rice(1, bytes(12)), "the gaps are not those of indices below 9"),
        (rice(1, b"\xff\x01\0\0", bytes(4)), "the gaps are not those of indices below 9"),
        (rice(1, b"\xff" * 4, bytes(4)), "the gaps are not those of indices below 9"),
        (section(Encoding.ROWS, 9, bytes(9)), "only the shape of its matrix tells"),
        (section(Encoding.TERNARY, 9, bytes(9)), "its elements are not listed"),
    ],
)
def test_a_forged_payload_is_told(forged: Section, reason: str) -> None:
    with pytest.raises(DlrmError) as caught:
        sparse_of(forged)
    start = f"tensor 6: no {forged.encoding.name} section: {reason}"
    assert str(caught.value).startswith(start)


def test_the_forged_one_of_many_is_told() -> None:
    good, bad = index32(3, 4), rice(1, b"\xff" * 4, bytes(4))
    with pytest.raises(DlrmError, match="tensor 6: no RICE section: the gaps"):
        sparse_of_all([good, good, bad, good])
    other = Section(7, Encoding.INDEX32, Dtype.BFLOAT16, 9, bytes(6))
    with pytest.raises(DlrmError, match="tensor 7: .* it holds bfloat16, others float32"):
        sparse_of_all([good, other])


@pytest.mark.parametrize(
    ("shape", "payload", "reason"),
    [
        ((3, 3), b"\0\0", "2 bytes hold no choice of 9 elements"),
        ((3, 3), b"\0\0\0\0\0", "5 bytes hold no choice"),
        ((3, 3), b"\x01\0\0\x01" + bytes(3), "7 bytes hold no choice"),
        ((3, 3), b"\x01\0\0\x03" + bytes(4), "columns do not rise inside their rows"),
        ((3, 3), b"\0\x02\0\x01\x01" + bytes(11), "columns do not rise inside their rows"),
        ((3, 3), b"\xff\xff\xff" + bytes(5), "8 bytes hold no choice"),
        ((2, 4), bytes(4), "9 elements are no matrix of 2 × 4"),
    ],
)
def test_forged_rows_are_told(shape: tuple[int, int], payload: bytes, reason: str) -> None:
    with pytest.raises(DlrmError) as caught:
        rows_of(section(Encoding.ROWS, 9, payload), shape)
    assert str(caught.value).startswith(f"tensor 6: no ROWS section: {reason}")


def genuine() -> list[Section]:
    """Sections of every encoding and type, empty, small and large, aligned and clustered."""
    rng = np.random.default_rng(3)
    found: list[Section] = []
    for dtype in sorted(FLOATS):
        for chance in (0.001, 0.05, 0.3, 0.9):
            chosen = rng.random(COUNT) < chance
            chosen[0] = True
            indices = np.flatnonzero(chosen).astype(np.int32)
            values = np.ones(indices.size, np.float32)
            found += [
                sparse(6, COUNT, indices, values, dtype),
                rows(6, SHAPE, indices, values, dtype, False),
                rows(6, SHAPE, indices[:300], values[:300], dtype, False),
            ]
        found.append(sparse(6, COUNT, np.arange(3, dtype=np.int32), np.ones(3, np.float32), dtype))
    assert {one.encoding for one in found} == set(SPARSE)
    return found


def changed(payload: bytes, rng: np.random.Generator) -> bytes:
    """The payload with bits turned, bytes overwritten, taken out or put in."""
    body = bytearray(payload)
    for _ in range(int(rng.integers(1, 4))):
        # Heads and the first codes decide about the rest.
        place = int(rng.integers(0, max(1, len(body) >> int(rng.integers(0, 6)))))
        match int(rng.integers(0, 6)):
            case 0:
                body[place : place + 1] = bytes([(body[place] if body else 0) ^ 1 << place % 8])
            case 1:
                body[place : place + 1] = rng.bytes(1)
            case 2:
                body[place : place + 8] = b"\xff" * 8
            case 3:
                del body[place : place + int(rng.integers(1, 9))]
            case 4:
                body[place:place] = rng.bytes(int(rng.integers(1, 9)))
            case _:
                body[0:4] = struct.pack("<I", int(rng.integers(0, 2**32)) & 0xF8000FFF)
    return bytes(body)


def forged(times: int) -> Iterator[Section]:
    rng = np.random.default_rng(4)
    originals = genuine()
    counts = np.array([0, 1, 7, COUNT - 1, COUNT + 1, 2**31 - 1, 2**31, 2**32 - 1])
    for number in range(times):
        one = originals[number % len(originals)]
        count = int(rng.choice(counts)) if rng.random() < 0.1 else COUNT
        encoding = Encoding(int(rng.integers(2, 6))) if rng.random() < 0.1 else one.encoding
        payload = changed(bytes(one.payload), rng)
        yield Section(6, encoding, one.dtype, count, payload)


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


def fuzz(times: int) -> tuple[int, int]:
    """Payloads read, and the most memory that one of them took beyond eight times its bytes."""
    assert all(accepted(one) for one in genuine())  # loading a kernel takes memory
    read = 0
    most_bytes = 0
    tracemalloc.start()
    try:
        for one in forged(times):
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            read += accepted(one)
            taken = tracemalloc.get_traced_memory()[1] - before
            most_bytes = max(most_bytes, taken - 8 * len(one.payload))
    finally:
        tracemalloc.stop()
    return read, most_bytes


def test_ten_thousand_forged_payloads_cost_little_memory() -> None:
    read, most_bytes = fuzz(10_000)
    assert 500 < read < 9_500
    assert most_bytes < 50_000


@pytest.mark.slow
def test_a_hundred_thousand_forged_payloads_cost_little_memory() -> None:
    read, most_bytes = fuzz(120_000)
    assert 5_000 < read < 115_000
    assert most_bytes < 50_000


def test_nothing_is_read_behind_the_end_of_a_payload() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 8 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    libc = ctypes.CDLL(None, use_errno=True)
    last = ctypes.c_void_p(start + 7 * page)
    assert libc.mprotect(last, ctypes.c_size_t(page), NO_ACCESS) == 0
    view = memoryview(memory)
    read = 0
    for one in [*genuine(), *forged(2_000)]:
        placed = view[7 * page - len(one.payload) : 7 * page]
        placed[:] = one.payload
        read += accepted(Section(one.tensor, one.encoding, one.dtype, one.count, placed))
    assert read > 0
