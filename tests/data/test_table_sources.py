"""Tables of any columns: each format gives what a plain reading gives; every fault is located."""

from __future__ import annotations

import gzip
import resource
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st
from table_rows import (
    BY_FRACTION,
    Row,
    make_rows,
    part_of,
    plain_dense,
    plain_ids,
    run_prepare,
    semantics,
    table,
    write_csv,
    write_npy,
    write_parquet,
)

from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.schema import ByFile, ByFraction, Dialect
from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.data.sources.cells import MISSING_INTEGER
from dlrm_hybrid.data.sources.files import open_source
from dlrm_hybrid.data.sources.values import read_values
from dlrm_hybrid.saved.encoding import Encoder
from dlrm_hybrid.types import ConfigError, DataError

ROWS = 600


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return make_rows(ROWS)


def arrays_of(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.load(path) for path in sorted(folder.rglob("*.npy"))}


def assert_same(one: Path, other: Path) -> None:
    left, right = arrays_of(one), arrays_of(other)
    assert list(left) == list(right)
    for name, array in left.items():
        np.testing.assert_array_equal(array, right[name], err_msg=name)


def test_a_table_equals_its_plain_reading(tmp_path: Path, rows: list[Row]) -> None:
    path = write_parquet(tmp_path / "rows.parquet", rows)
    made = run_prepare([path], tmp_path / "out", table())
    found = arrays_of(tmp_path / "out")
    parts = [part_of(row) for row in rows]
    order = sorted(range(ROWS), key=lambda number: parts[number])
    vocabularies = open_shards(tmp_path / "out", None).preprocessing.vocabularies()
    assert [part.rows for part in made.parts] == [parts.count(part) for part in range(3)]
    assert found["label.npy"].tolist() == [rows[number]["bought"] for number in order]
    np.testing.assert_allclose(found["dense.npy"], plain_dense(rows, parts)[order], rtol=1e-6)
    for place, (name, least) in enumerate((("città", 3), ("shop", 1), ("device", 1), ("code", 1))):
        # An empty code is the code 0, as in Criteo's rows.
        plain = [(row[name] or "00000000") if name == "code" else row[name] for row in rows]
        kept, ids = plain_ids(plain, parts, least)
        wanted = [ids.get(plain[number], 0) for number in order]
        assert found["ids.npy"][:, place].tolist() == wanted
        assert made.table_rows[place] == len(kept) + 1
        stored = vocabularies[place].keys
        empty = MISSING_INTEGER if name == "shop" else ""
        wanted_keys = [empty if one is None else one for one in kept]
        assert list(stored) == [int(one, 16) if name == "code" else one for one in wanted_keys]
    assert made.table_rows[4] == 1 + 50 + 1  # others, all buckets whatever was seen, missing
    tags = [tag for row in rows for tag in row["tags"]]
    _, ids = plain_ids(
        tags, [part for part, row in zip(parts, rows, strict=True) for _ in row["tags"]]
    )
    wanted_tags = [[ids.get(tag, 0) for tag in rows[number]["tags"]] for number in order]
    assert found["ids.6.values.npy"].tolist() == sum(wanted_tags, [])
    assert np.diff(found["ids.6.offsets.npy"]).tolist() == [len(one) for one in wanted_tags]
    verify(open_shards(tmp_path / "out", semantics(table())), lambda done: None)


def test_every_format_and_every_cut_into_files_gives_the_same(
    tmp_path: Path, rows: list[Row]
) -> None:
    run_prepare([write_parquet(tmp_path / "a.parquet", rows)], tmp_path / "wanted", table())
    plain = write_csv(tmp_path / "a.csv", rows)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    (tmp_path / "c.csv.zst").write_bytes(zstandard.compress(plain.read_bytes()))
    pieces = [
        write_csv(tmp_path / "d1.csv", rows[:201]),
        write_csv(tmp_path / "d2.csv", rows[201:]),
    ]
    mixed = [pieces[0], write_parquet(tmp_path / "e.parquet", rows[201:])]
    for number, raw in enumerate(
        ([plain], [tmp_path / "b.csv.gz"], [tmp_path / "c.csv.zst"], pieces, mixed)
    ):
        run_prepare(raw, tmp_path / f"out{number}", table())
        assert_same(tmp_path / f"out{number}", tmp_path / "wanted")


def test_evaluations_score_the_part_to_validate(tmp_path: Path, rows: list[Row]) -> None:
    path = write_csv(tmp_path / "a.csv", rows)
    run_prepare([path], tmp_path / "out", table())
    shards = open_shards(tmp_path / "out", None)
    counts = [sum(part_of(row) == part for row in rows) for part in range(3)]
    assert list(shards.test_rows("validation")) == list(range(counts[0], counts[0] + counts[1]))
    assert list(shards.test_rows("day")) == list(range(counts[0] + counts[1], ROWS))
    split = ByFraction(by="fraction", test=0.5)
    run_prepare([path], tmp_path / "none", replace(table(BY_FRACTION), split=split))
    with pytest.raises(
        ConfigError, match="test_part = validation: the rows of .* have no such part"
    ):
        open_shards(tmp_path / "none", None).test_rows("validation")


def test_npy_files_hold_tables_too(tmp_path: Path, rows: list[Row]) -> None:
    full = [{**row, "shop": row["shop"] or 0} for row in rows]
    schema = table(tags=False)
    run_prepare([write_csv(tmp_path / "a.csv", full)], tmp_path / "wanted", schema)
    without = replace(schema, ignore=("user",))
    made = run_prepare([write_npy(tmp_path / "a.npy", full)], tmp_path / "out", without)
    assert_same(tmp_path / "out", tmp_path / "wanted")
    assert made.sources[0].xxh3 == manifests.file_xxh3(tmp_path / "a.npy")
    np.save(tmp_path / "matrix.npy", np.zeros((3, 4)))
    with pytest.raises(DataError, match="matrix.npy: float64.*a structured array of one dimension"):
        run_prepare([tmp_path / "matrix.npy"], tmp_path / "no", schema)


@given(
    st.sampled_from(
        ["(3,)", f"({2**60},)", f"({2**64},)", "(-3,)", "(4,)", "(", "", "3", "(True,)", "[" * 999]
    ),
    st.sampled_from(["'<f4'", "'O'", "'z'", "'<f4', (2**40,)", f"'<f4', ({2**40},)", "[", "0"]),
    st.integers(0, 200),
)
def test_any_header_of_npy_is_read_or_a_fault(
    tmp_path: Path, shape: str, kind: str, kept: int
) -> None:
    text = f"{{'descr': [('y', {kind})], 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    path = tmp_path / "a.npy"
    path.write_bytes(b"\x93NUMPY\x01\0" + len(text).to_bytes(2, "little") + text + bytes(kept))
    try:
        source = open_source(path, Dialect(), 1 << 16, lambda piece: None)
    except DataError as error:
        assert str(error).startswith(f"{path}: ") and str(error).isprintable()
    else:
        assert sum(len(block.row_N) for block in source.blocks(["y"])) == kept // 4


def test_parts_by_fraction_and_by_file(tmp_path: Path, rows: list[Row]) -> None:
    whole = write_csv(tmp_path / "all.csv", rows)
    made = run_prepare([whole], tmp_path / "drawn", table(BY_FRACTION))
    counts = [part.rows for part in made.parts]
    assert sum(counts) == ROWS and 80 < counts[1] < 160 and 80 < counts[2] < 160
    halves = [write_csv(tmp_path / "d1.csv", rows[:77]), write_csv(tmp_path / "d2.csv", rows[77:])]
    run_prepare(halves, tmp_path / "again", table(BY_FRACTION))
    assert_same(tmp_path / "drawn", tmp_path / "again")  # by the number of the row over all files
    other = table(BY_FRACTION.replace("seed: 3", "seed: 4"))
    assert run_prepare([whole], tmp_path / "other", other).identity != made.identity

    files = [write_csv(tmp_path / f"{name}.csv", rows[:50]) for name in ("x1", "val1", "t1", "x2")]
    split = ByFile(by="file", validation=("val*",), test=("t?.csv",))
    made = run_prepare(files, tmp_path / "files", replace(table(BY_FRACTION), split=split))
    assert [part.rows for part in made.parts] == [100, 50, 50]
    with pytest.raises(DataError, match=r"no rows for the part `test` \(100 to train, 50 to vali"):
        raw = [files[0], files[1], files[3]]
        run_prepare(raw, tmp_path / "none", replace(table(BY_FRACTION), split=split))


BAD: list[tuple[dict[str, Any], str]] = [
    ({"bought": "2"}, "column 'bought': '2' is neither 0 nor 1"),
    ({"bought": ""}, "column 'bought': is empty"),
    (
        {"age": "old"},
        "column 'age': 'old' is not a number; words for missing values are `missing_values`",
    ),
    ({"price": "inf"}, "column 'price': .*inf.* is infinite"),
    ({"score": "1e300"}, "column 'score': .*1e300.* is outside 32 bits"),
    ({"shop": "12.5"}, "column 'shop': .*12.5.* is not an integer of 64 bits"),
    ({"shop": str(2**63)}, "column 'shop': .* is not an integer of 64 bits"),
    ({"code": "abc"}, "column 'code': .*abc.* is not eight hexadecimal digits"),
    ({"when": "yesterday"}, "column 'when': 'yesterday' is not a time as"),
    ({"when": ""}, "column 'when': is empty"),
    ({"tags": ["t"] * 7}, "column 'tags': 7 values, max_length = 6"),
]


@pytest.mark.parametrize(("change", "told"), BAD)
def test_a_bad_row_is_told_with_file_row_and_column(
    tmp_path: Path, rows: list[Row], change: dict[str, Any], told: str
) -> None:
    spoilt = [*rows[:300], {**rows[300], **change}, *rows[301:]]
    path = write_csv(tmp_path / "a.csv", spoilt)
    found = rf"a.csv: row 301: {told}.*\(data.on_bad_row=error; skip"
    with pytest.raises(DataError, match=found) as caught:
        run_prepare([path], tmp_path / "out", table())
    assert str(caught.value).isprintable()
    run_prepare([path], tmp_path / "skipped", table(), on_bad_row="skip")
    good = write_csv(tmp_path / "good.csv", [*rows[:300], *rows[301:]])
    run_prepare([good], tmp_path / "wanted", table())
    assert_same(tmp_path / "skipped", tmp_path / "wanted")
    made = run_prepare([path], tmp_path / "aside", table(), on_bad_row="quarantine")
    assert made.bad_rows == 1
    aside = (tmp_path / "aside" / "bad_rows.txt").read_text()
    assert aside.startswith("a.csv: row 301: column ") and rows[300]["page"] in aside
    with pytest.raises(DataError, match=r"more than 0 bad rows \(data.max_bad_rows\); .*row 301"):
        run_prepare([path], tmp_path / "no", table(), on_bad_row="skip", max_bad_rows=0)


def test_columns_may_be_more_than_files_may_be_open(tmp_path: Path) -> None:
    names = [f"c{column}" for column in range(70)]
    pq.write_table(
        pa.table({name: [i % 7 for i in range(40)] for name in names} | {"y": [0, 1] * 20}),
        tmp_path / "a.parquet",
    )
    columns = ", ".join(f"{{name: {name}, kind: integer}}" for name in names)
    split = "split: {by: fraction, validation: 0.3, test: 0.3}"
    schema = schemas.loads(f"label: y\ndense: []\ncategorical: [{columns}]\n{split}", "s")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = len(list(Path("/proc/self/fd").iterdir()))
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened + 30, limits[1]))
    try:
        made = run_prepare([tmp_path / "a.parquet"], tmp_path / "out", schema)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert made.rows == 40
    verify(open_shards(tmp_path / "out", None), lambda done: None)


@pytest.mark.parametrize("options", [{}, {"write_page_index": True}, {"row_group_size": 7}])
def test_parquet_files_put_together_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    parts = [pa.table({"y": [0, 1] * 50, "x": range(first, first + 100)}) for first in (0, 10**6)]
    parts += [parts[0].slice(0, 0), pa.table({"z": ["long text " * 99] * 3})]
    content: list[bytes] = []
    for part in parts:
        pq.write_table(part, tmp_path / "a.parquet", **options)
        assert open_source(tmp_path / "a.parquet", Dialect(), 1 << 16, len).names
        content.append((tmp_path / "a.parquet").read_bytes())
    for first, last in product(content, content):
        (tmp_path / "a.parquet").write_bytes(first + last)
        with pytest.raises(DataError, match=r"a.parquet: Parquet files put together byte by byte"):
            open_source(tmp_path / "a.parquet", Dialect(), 1 << 16, len)


def test_lines_of_other_lengths_and_bytes_that_are_no_text(tmp_path: Path, rows: list[Row]) -> None:
    path = write_csv(tmp_path / "a.csv", rows)
    lines = path.read_bytes().splitlines(keepends=True)
    (tmp_path / "b.csv").write_bytes(b"".join([*lines[:3], b"1,\xe9,3\n", *lines[3:]]))
    with pytest.raises(DataError, match=r"b.csv: row 3: 3 columns instead of 12"):
        run_prepare([tmp_path / "b.csv"], tmp_path / "out", table())
    (tmp_path / "c.csv").write_bytes(path.read_bytes().replace(b"tablet", b"tabl\xe9\xff", 1))
    with pytest.raises(DataError, match=r"c.csv: row \d+: column 'device': .* is not UTF-8"):
        run_prepare([tmp_path / "c.csv"], tmp_path / "out", table())
    for name in ("b", "c"):
        raw = [tmp_path / f"{name}.csv"]
        made = run_prepare(raw, tmp_path / f"out_{name}", table(), on_bad_row="quarantine")
        assert (made.rows, made.bad_rows) == (ROWS - (name == "c"), 1)
    told = (tmp_path / "out_b" / "bad_rows.txt").read_text()
    assert told == "b.csv: row 3: 3 columns instead of 12\t1,\\xe9,3\n"


def test_files_with_other_columns_are_refused(tmp_path: Path, rows: list[Row]) -> None:
    path = write_csv(tmp_path / "a.csv", rows)
    with pytest.raises(DataError, match=r"column 'user': not in the schema; use it or name it in"):
        run_prepare([path], tmp_path / "out", replace(table(), ignore=()))
    without = [{name: value for name, value in row.items() if name != "shop"} for row in rows]
    with pytest.raises(DataError, match=r"b.csv: no column 'shop'; it has 'user', 'bought'"):
        run_prepare([write_csv(tmp_path / "b.csv", without)], tmp_path / "out", table())
    (tmp_path / "b.csv").write_text("user;age\n1;2\n")
    with pytest.raises(DataError, match=r"it has 'user;age': does the schema have its `delimiter`"):
        run_prepare([tmp_path / "b.csv"], tmp_path / "out", table())
    (tmp_path / "c.csv").write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match=r"c.csv: column 'a' is there twice: rename one of them"):
        run_prepare([tmp_path / "c.csv"], tmp_path / "out", table())
    (tmp_path / "d.csv").write_text("")
    with pytest.raises(DataError, match=r"d.csv: empty: no header"):
        run_prepare([tmp_path / "d.csv"], tmp_path / "out", table())
    head = path.read_text().partition("\n")[0]
    (tmp_path / "e.csv").write_text(head + "\n")
    with pytest.raises(DataError, match=r"e.csv: no rows for the part `train`"):
        run_prepare([tmp_path / "e.csv"], tmp_path / "out", table())
    lists = pa.table({**{name: [None] for name in rows[0]}, "shop": [[1, 2]]})
    pq.write_table(lists, tmp_path / "f.parquet")
    with pytest.raises(DataError, match=r"f.parquet: column 'shop': holds lists; .*max_length > 1"):
        run_prepare([tmp_path / "f.parquet"], tmp_path / "out", table())
    content = write_parquet(tmp_path / "g.parquet", rows).read_bytes()
    (tmp_path / "g.parquet").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"g.parquet: cannot be read: .*\(data.raw\)"):
        run_prepare([tmp_path / "g.parquet"], tmp_path / "out", table())


def test_a_number_that_standardising_makes_infinite_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("y,d,c\n0,0.001,x\n1,0.002,x\n")
    (tmp_path / "t.csv").write_text("y,d,c\n1,3e38,x\n")
    schema = schemas.loads(
        "label: y\ndense: [{name: d, transform: standardise}]\ncategorical: [{name: c}]\n"
        "split: {by: file, test: [t.csv]}",
        "s",
    )
    told = r"column 'd': 3e\+38 of the part `test` is outside 32 bits once it is standardised"
    with pytest.raises(DataError, match=told):
        run_prepare([tmp_path / "a.csv", tmp_path / "t.csv"], tmp_path / "out", schema)


def test_new_rows_are_encoded_as_the_prepared_ones(tmp_path: Path, rows: list[Row]) -> None:
    path = write_csv(tmp_path / "a.csv", rows)
    made = run_prepare([path], tmp_path / "out", table())
    encoder = Encoder(open_shards(tmp_path / "out", None).preprocessing.columns(), "error")
    source = open_source(path, Dialect(), 1 << 16, lambda piece: None)
    (block,) = source.blocks(made.schema.read_columns)
    values, bad = read_values(block, made.schema, str(path), labels=True)
    assert not bad
    bags = encoder.bags(values)
    found = arrays_of(tmp_path / "out")
    order = sorted(range(ROWS), key=lambda number: part_of(rows[number]))
    np.testing.assert_array_equal(encoder.dense(values)[order], found["dense.npy"])
    assert values.label_N is not None
    np.testing.assert_array_equal(values.label_N[order], found["label.npy"])
    assert bags.offsets is not None
    ids = [bags.values[bags.offsets[i] : bags.offsets[i + 1]].tolist() for i in range(6 * ROWS)]
    for column in range(5):
        mine = [ids[column * ROWS + number][0] for number in order]
        assert mine == found["ids.npy"][:, column].tolist()
    assert (
        sum((ids[5 * ROWS + number] for number in order), []) == found["ids.6.values.npy"].tolist()
    )


@given(st.binary(max_size=300) | st.text('ab,"\n\r01|é;', max_size=120).map(str.encode))
def test_any_bytes_are_rows_or_a_fault(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.csv").write_bytes(b"y,c\n" + content)
    schema = schemas.loads(
        "label: y\ndense: []\ncategorical: [{name: c}]\nsplit: {by: fraction, test: 0.5}", "s"
    )
    try:
        made = run_prepare([folder / "a.csv"], folder / "out", schema, on_bad_row="skip")
    except (ConfigError, DataError) as error:
        assert "a.csv" in str(error)
    else:
        verify(open_shards(folder / "out", None), lambda done: None)
        assert made.rows > 0
