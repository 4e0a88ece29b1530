from __future__ import annotations

import math
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutated_bytes import memory_of

from dlrm_hybrid.data.sources.criteo import ParsedRows, column_name, fault, parse
from dlrm_hybrid.types import DlrmError

GOOD = b"1\t" + b"\t".join([b"5"] * 13) + b"\t" + b"\t".join([b"0000abcd"] * 26) + b"\n"

# The grammar of a row in one expression: an oracle that shares no code with the parser.
ROW = re.compile(rb"[01](\t(-?[0-9]{1,10})?){13}(\t([0-9a-fA-F]{8})?){26}\r?\n")


def read(text: bytes, max_bad_rows: int = 10**6) -> ParsedRows:
    return parse(np.frombuffer(bytearray(text), np.uint8), max_bad_rows)


def is_good(line: bytes) -> bool:
    if not ROW.fullmatch(line):
        return False
    integers = [int(field or b"0") for field in line.rstrip(b"\r\n").split(b"\t")[1:14]]
    return all(-(2**31) <= value < 2**31 for value in integers)


def expected_words(line: bytes) -> tuple[list[float], list[int]]:
    fields = line.rstrip(b"\r\n").split(b"\t")
    words = [float(fields[0])]
    words += [float(np.float32(math.log(max(int(x or b"0"), 0) + 1.0))) for x in fields[1:14]]
    return words, [int(field or b"0", 16) for field in fields[14:]]


def replaced(column: int, value: bytes) -> bytes:
    fields = GOOD[:-1].split(b"\t")
    fields[column - 1] = value
    return b"\t".join(fields) + b"\n"


good_integers = st.one_of(
    st.just(b""),
    st.integers(-(2**31), 2**31 - 1).map(lambda value: b"%d" % value),
    st.sampled_from([b"-0", b"0000000007", b"2147483647", b"-2147483648", b"16383", b"16384"]),
)
good_keys = st.one_of(
    st.just(b""), st.just(b"00000000"), st.from_regex(rb"[0-9a-fA-F]{8}", fullmatch=True)
)
good_lines = st.builds(
    lambda label, integers, keys, end: b"\t".join([label, *integers, *keys]) + end,
    st.sampled_from([b"0", b"1"]),
    st.lists(good_integers, min_size=13, max_size=13),
    st.lists(good_keys, min_size=26, max_size=26),
    st.sampled_from([b"\n", b"\r\n"]),
)


PIECES = (
    *(b"", b"\t", b"-", b"0", b"1", b"9", b"g", b"F", b"\0", b"\xff", b"\r", b" ", b"\t\t", b"--"),
    *(b"2147483647", b"2147483648", b"-2147483648", b"-2147483649", b"9" * 30, b"0000abcd"),
    *("é".encode(), b"\xe2\x80\xae", b"\xf0\x28", b"+1", b"1.5", b"0x1f", b"nan", b"\x1a"),
)


@st.composite
def mutated_lines(draw: st.DrawFn) -> bytes:
    """A good line with a few bytes replaced, removed or put in; it may still be good."""
    line = bytearray(draw(st.just(GOOD) | good_lines))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(line) - 1))
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=2))
        line[at : at + draw(st.integers(0, 12))] = piece
    return bytes(line.replace(b"\n", b"")) + b"\n"


any_lines = st.binary(max_size=200).map(lambda line: line.replace(b"\n", b"") + b"\n")


@given(st.lists(good_lines | mutated_lines() | any_lines, max_size=5), st.integers(0, 300))
def test_kernel_slow_reading_and_grammar_agree(lines: list[bytes], cut: int) -> None:
    if lines:
        lines[-1] = lines[-1][: len(lines[-1]) - cut % len(lines[-1])]
    columns = read(b"".join(lines))
    good = [line for line in lines if is_good(line)]
    bad = [number for number, line in enumerate(lines) if not is_good(line)]
    assert [row.line for row in columns.bad] == bad
    assert [row.raw for row in columns.bad] == [lines[at].removesuffix(b"\n") for at in bad]
    assert columns.dense_RI.shape == (len(good), 13)
    assert all(row.reason.isprintable() and len(row.reason) < 250 for row in columns.bad)
    for row, line in enumerate(good):
        words, keys = expected_words(line)
        assert fault(line) is None
        assert [columns.label_R[row], *columns.dense_RI[row]] == words
        assert columns.keys_FR[:, row].tolist() == keys
    assert columns.zero_keys == sum(
        line.rstrip().split(b"\t")[14:].count(b"00000000") for line in good
    )


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        (replaced(1, b"2"), 1, "label '2' is neither 0 nor 1"),
        (replaced(1, b""), 1, "label '' is neither 0 nor 1"),
        (replaced(4, b"abc"), 4, "'abc' is not an integer"),
        (replaced(4, b"-"), 4, "'-' is not an integer"),
        (replaced(4, b"1.5"), 4, "'1.5' is not an integer"),
        (replaced(14, b"2147483648"), 14, "'2147483648' is outside 32 bits"),
        (replaced(14, b"-2147483649"), 14, "'-2147483649' is outside 32 bits"),
        (replaced(14, b"9" * 99), 14, "is outside 32 bits"),
        (replaced(15, b"0000000g"), 15, "'0000000g' is not eight hexadecimal digits"),
        (replaced(15, b"abc"), 15, "'abc' is not eight hexadecimal digits"),
        (replaced(40, b"0000abcde"), 40, "'0000abcde' is not eight hexadecimal digits"),
        (replaced(40, b"0000abc\xff"), 40, "not UTF-8: '0000abc\\xff'"),
        (replaced(20, b"0000\0abc"), 20, "NUL byte in '0000\\x00abc'"),
        (replaced(20, "0000äbc".encode()), 20, "'0000\\xe4bc' is not eight hexadecimal digits"),
        (replaced(40, b"0000abcd\r"), 40, "'0000abcd\\r' is not eight"),
        (b"\n", 1, "1 columns instead of 40"),
        (b"\t".join([b"0"] * 20) + b"\n", 20, "20 columns instead of 40"),
        (GOOD[:-1] + b"\t\n", 41, "41 columns instead of 40"),
        (GOOD[2:], 39, "39 columns instead of 40"),
        (GOOD[2:], 39, "test.txt"),
        (GOOD[:-1], 40, "the file ends inside this line: '1\\t5\\t5"),
        (GOOD[:40], 16, "the file ends inside this line"),
    ],
)
def test_reasons_name_column_and_value(line: bytes, column: int, reason: str) -> None:
    line = line.replace(b"\r\n", b"\r\r\n")  # one return belongs to the line end
    good = GOOD * 3
    bad = read(good + line + (good if line.endswith(b"\n") else b"")).bad
    assert [(row.line, row.column, row.raw) for row in bad] == [
        (3, column, line.removesuffix(b"\n"))
    ]
    assert reason in bad[0].reason
    assert len(bad[0].reason) < 200
    assert bad[0].reason.isprintable()
    assert fault(line) == (column, bad[0].reason)


def test_a_block_costs_little_memory() -> None:
    bad = [replaced(4, piece) for piece in PIECES if b"\n" not in piece]
    text = b"".join([GOOD, *bad] * 80)
    assert len(read(text).bad) > 1000  # loading a kernel takes memory of its own
    assert memory_of(lambda: read(text)) < 16 << 20


def test_explains_as_many_as_asked_for() -> None:
    columns = read(b"x\n" * 5 + GOOD + b"y\n" + b"cut", max_bad_rows=3)
    assert [row.line for row in columns.bad] == [0, 1, 2]
    assert len(columns.label_R) == 1
    assert [row.line for row in read(b"x\n" * 2 + b"cut", max_bad_rows=3).bad] == [0, 1, 2]


def test_a_good_row_refused_by_the_kernel_is_an_internal_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse_all(text: np.ndarray, *rest: np.ndarray) -> tuple[int, int, int]:
        rest[-1][0] = (0, text.size, 0)
        return 0, 1, 0

    monkeypatch.setattr("dlrm_hybrid.data.sources.criteo.parse_rows", refuse_all)
    with pytest.raises(DlrmError, match="internal error"):
        read(GOOD)


def test_empty_text_has_no_rows() -> None:
    columns = read(b"")
    assert columns.dense_RI.shape == (0, 13)
    assert columns.bad == ()


def test_column_names() -> None:
    names = [column_name(column) for column in (1, 2, 14, 15, 40, 41)]
    assert names == ["label", "I1", "I13", "C1", "C26", ""]
