"""CSV is read as Python's csv module reads it; quotes that swallow rows are faults."""

from __future__ import annotations

import csv
import io
import random
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st
from table_rows import run_prepare

from dlrm_hybrid.data.schema import Dialect
from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.sources.files import open_source
from dlrm_hybrid.data.sources.guess import guess
from dlrm_hybrid.data.sources.raw import BadRowPolicy
from dlrm_hybrid.predict.sources import read_blocks
from dlrm_hybrid.types import DataError

SCHEMA = """
label: y
dense: []
categorical: [{name: title}, {name: user}]
split: {by: fraction, test: 0.5}
delimiter: "\\t"
"""
NAMES = ("a", "b", "c")
Rows = dict[int, list[str]]


def plain_rows(text: str, dialect: Dialect) -> Rows:
    quoting = csv.QUOTE_NONE if dialect.quote == "none" else csv.QUOTE_MINIMAL
    lines = io.StringIO(text, newline="")
    found = csv.reader(lines, delimiter=dialect.delimiter, quoting=quoting)
    return dict(enumerate((row for row in found if row), 1))


def read_rows(path: Path, dialect: Dialect, block_bytes: int) -> tuple[Rows, dict[int, str]]:
    rows: Rows = {}
    odd: dict[int, str] = {}
    for block in open_source(path, dialect, block_bytes, len).blocks(NAMES[::-1]):
        columns = [column.to_pylist() for column in block.columns.columns[::-1]]
        values = [
            [(one or b"").decode("latin-1") for one in row] for row in zip(*columns, strict=True)
        ]
        rows |= dict(zip(block.row_N.tolist(), values, strict=True))
        odd |= {one.row: one.reason for one in block.odd}
    return rows, odd


@given(
    st.lists(
        st.sampled_from([*'ab"\n\r,;\t ', '""', "\r\n", '"a",', ',b,"', "x,y,z\n", "é", "\0"]),
        max_size=60,
    ).map("".join),
    st.sampled_from([Dialect(), Dialect(delimiter="\t"), Dialect(quote="none")]),
    st.integers(1, 40),
    st.booleans(),
)
@example("a\r\nb", Dialect(), 2, False)
def test_rows_are_those_of_the_csv_module(
    tmp_path: Path, text: str, dialect: Dialect, block_bytes: int, bom: bool
) -> None:
    path = tmp_path / "a.csv"
    header = dialect.delimiter.join(NAMES) + "\n"
    path.write_bytes(b"\xef\xbb\xbf" * bom + (header + text).encode("latin-1"))
    is_open = list(plain_rows(text + "\nend\n", dialect).values())[-1] != ["end"]
    try:
        rows, odd = read_rows(path, dialect, block_bytes)
    except DataError as error:
        assert "quote" in str(error) and dialect.quote == "double"
        assert is_open or "in the middle of a value" in str(error)
        return
    assert not is_open
    wanted = plain_rows(text, dialect)
    assert {**dict.fromkeys(odd), **rows}.keys() == wanted.keys()
    again = [number for number, row in wanted.items() if row == list(NAMES)]
    assert [number for number, row in wanted.items() if len(row) != 3] == [
        number for number in sorted(odd) if number not in again
    ]
    assert all(row == wanted[number] for number, row in rows.items())


def plays(tmp_path: Path, spoil: dict[int, str], rows: int = 2000) -> Path:
    lines = [f"{row % 2}\ttitle {row}\tu{row % 9}\n" for row in range(1, rows + 1)]
    for row, line in spoil.items():
        lines[row - 1] = line
    path = tmp_path / "plays.tsv"
    path.write_text("y\ttitle\tuser\n" + "".join(lines))
    return path


OPEN = r"row 201: column 'title': a quote begins here and has no end; `quote: none` in the schema"
TORN = r"row 201: column 'title': the end of a quote that begins here is in the middle of a value"


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        ({201: '1\t"La Vita\tu1\n'}, OPEN),
        ({201: '1\t"La Vita\tu1\n', 300: '1\t"Più\tu1\n'}, TORN),
        ({201: '1\t"La Vita\tu1\n', 300: '1\tnow"then\tu1\n'}, TORN),
    ],
    ids=["open", "begins", "within"],
)
def test_a_quote_that_swallows_rows_is_told(
    tmp_path: Path, spoil: dict[int, str], told: str
) -> None:
    path, schema = plays(tmp_path, spoil), schemas.loads(SCHEMA, "s.yaml")
    with pytest.raises(DataError, match=f"plays.tsv: {told}.*data.raw"):
        run_prepare([path], tmp_path / "no", schema, on_bad_row="skip")
    with pytest.raises(DataError, match=f"plays.tsv: {told}.*predict.rows"):
        list(read_blocks([path], schema, (), 1 << 16, lambda done: None))
    with pytest.raises(DataError, match=f"plays.tsv: {told}.*data.guess"):
        guess(path, BadRowPolicy(True, 0, None))
    plain = schemas.loads(SCHEMA + "quote: none\n", "s.yaml")
    assert run_prepare([path], tmp_path / "out", plain).rows == 2000
    blocks = list(read_blocks([path], plain, ("title",), 1 << 16, lambda done: None))
    assert sum(len(block.kept["title"]) for block in blocks) == 2000
    assert blocks[0].kept["title"][200].as_py() == '"La Vita'


def test_rows_before_an_open_quote_come_first(tmp_path: Path) -> None:
    path = plays(tmp_path, {7: "1\ttwo values\n", 201: '1\t"La Vita\tu1\n'})
    with pytest.raises(DataError, match="row 7: 2 columns instead of 3"):
        run_prepare([path], tmp_path / "no", schemas.loads(SCHEMA, "s.yaml"))


@pytest.mark.parametrize("quote", ['"', ""])
def test_a_row_without_end_is_told(tmp_path: Path, quote: str) -> None:
    path = plays(tmp_path, {9: f"1\t{quote}{'long ' * (1 << 19)}\n"}, rows=60_000)
    told = OPEN.replace("201", "9") if quote else r"row 9: longer than 1048576 bytes"
    with pytest.raises(DataError, match=told):
        run_prepare([path], tmp_path / "no", schemas.loads(SCHEMA, "s.yaml"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b'y,"c\n1,2\n', "row 0: a quote begins here and has no end"),
        (b"y,\xe9\n1,2\n", "row 0: no header of CSV: .*utf-8"),
        (b"y" * (1 << 21), "row 0: longer than 1048576 bytes"),
        (b"", "empty: no header"),
        (b"\xef\xbb\xbf\n\r\n", "empty: no header"),
    ],
)
def test_a_header_that_is_none_is_told(tmp_path: Path, text: bytes, told: str) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(text)
    with pytest.raises(DataError, match=f"a.csv: {told}"):
        open_source(path, Dialect(), 1 << 16, len)


@pytest.mark.parametrize("before", [b"\n", b"\r\n\r\n", b"\xef\xbb\xbf\n"])
def test_empty_lines_before_the_header_are_none(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(before + b"a,b,c\n1,2,3\na,b,c\n")
    rows, odd = read_rows(path, Dialect(), 1 << 16)
    assert rows == {1: ["1", "2", "3"]} and "the header again" in odd[2]


def test_a_header_among_the_rows_is_no_row(tmp_path: Path) -> None:
    path, schema = plays(tmp_path, {}), schemas.loads(SCHEMA, "s.yaml")
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match="row 2001: the header again"):
        run_prepare([path], tmp_path / "no", schema)
    made = run_prepare([path], tmp_path / "out", schema, on_bad_row="skip")
    assert (made.rows, made.bad_rows) == (4000, 1)


def test_compressed_csv_is_read_to_its_end(tmp_path: Path) -> None:
    drawn = random.Random(1)  # a text 8 times as long as its file
    lines = [
        f"{row & 1},{drawn.randrange(10**6):06d}{'x' * 28},{row % 7}\n" for row in range(200_000)
    ]
    text = f"a,b,c\n{''.join(lines)}".encode()
    path = tmp_path / "a.csv.zst"
    path.write_bytes(zstandard.ZstdCompressor(5).compress(text))
    source = open_source(path, Dialect(), 1 << 20, len)
    assert sum(block.columns.num_rows for block in source.blocks(("a",))) == 200_000


def test_a_file_that_grows_until_the_end_is_refused(tmp_path: Path) -> None:
    path = plays(tmp_path, {})

    def grow(stage: str, done: int, total: int | None) -> None:
        if stage == "assemble" and not done:
            path.write_bytes(path.read_bytes() + b"1\tlate\tu1\n")

    with pytest.raises(DataError, match="plays.tsv: changed while it was read: .* bytes at first"):
        run_prepare([path], tmp_path / "out", schemas.loads(SCHEMA, "s.yaml"), progress=grow)
    assert not (tmp_path / "out").exists()


def test_no_thread_outlives_reading(tmp_path: Path) -> None:
    path = plays(tmp_path, {1999: '1\t"open\tu1\n'})
    before = set(Path("/proc/self/task").iterdir())
    for _ in range(3):
        with pytest.raises(DataError):
            guess(path, BadRowPolicy(True, 0, None))
    assert set(Path("/proc/self/task").iterdir()) <= before


def test_csv_is_read_by_one_block_at_a_time(tmp_path: Path) -> None:
    block_bytes, row = 1 << 19, "x" * 1000 + "\n"
    (tmp_path / "a.csv").write_text("c\n" + row * 12_000)
    seen = 0

    def note(piece: bytes) -> None:
        nonlocal seen
        seen += len(piece)

    source = open_source(tmp_path / "a.csv", Dialect(), block_bytes, note)
    blocks = source.blocks(["c"])
    rows = len(next(blocks).row_N)
    assert rows * len(row) <= seen <= block_bytes + (1 << 17)  # the last piece is read whole
    numbers = [block.row_N for block in blocks]
    assert np.concatenate(numbers).tolist() == list(range(rows + 1, 12_001))
