from __future__ import annotations

import ctypes
import math
import mmap

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.kernels.criteo import count_lines, fill_log_table, parse_rows

PAGE = mmap.PAGESIZE
ROW = b"1\t" + b"7\t" * 13 + b"\t".join([b"0123abcd"] * 26) + b"\n"


@pytest.fixture(scope="module")
def guarded() -> np.ndarray:
    """A page of bytes behind which any access ends the process."""
    memory = mmap.mmap(-1, 2 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    assert protect(ctypes.c_void_p(address + PAGE), ctypes.c_size_t(PAGE), 0) == 0
    return np.frombuffer(memory, np.uint8, count=PAGE)


@given(
    pieces=st.lists(
        st.one_of(
            st.integers(0, len(ROW)).map(lambda end: ROW[:end]),
            st.binary(max_size=20),
            st.sampled_from([ROW, b"0\t", b"1\t-", b"\r", b"\n", b"\t" * 39]),
        ),
        max_size=8,
    )
)
def test_nothing_behind_the_text_is_read(guarded: np.ndarray, pieces: list[bytes]) -> None:
    data = b"".join(pieces) + b"\n"
    text = guarded[PAGE - len(data) :]
    text[:] = np.frombuffer(data, np.uint8)
    lines, end = count_lines(text)
    assert (lines, end) == (data.count(b"\n"), len(data))
    labels, dense = np.empty(lines, np.float32), np.empty((lines, 13), np.float32)
    keys = np.empty((26, lines), np.uint32)
    bad = np.empty((lines, 3), np.int64)
    rows, num_bad, _ = parse_rows(text, np.zeros(4, np.float32), labels, dense, keys, bad)
    assert rows + num_bad == lines
    assert rows >= data.split(b"\n").count(ROW[:-1])


@given(st.binary(max_size=300))
def test_lines_are_counted_as_python_does(data: bytes) -> None:
    counted = count_lines(np.frombuffer(bytearray(data), np.uint8))
    assert counted == (data.count(b"\n"), data.rfind(b"\n") + 1)


def test_the_table_of_logarithms_is_rounded_from_float64() -> None:
    table = np.empty(5000, np.float32)
    fill_log_table(table)
    expected = [np.float32(math.log(x + 1.0)) for x in range(5000)]
    np.testing.assert_array_equal(table, expected)
