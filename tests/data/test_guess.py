"""Schemas that are guessed: `prepare` takes what `guess` writes, of whatever rows."""

from __future__ import annotations

import csv
import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from table_rows import run_prepare

from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.sources.arrow import pa, parquet
from dlrm_hybrid.data.sources.guess import Guess, guess
from dlrm_hybrid.data.sources.raw import BadRowPolicy
from dlrm_hybrid.types import DataError

ROWS = 60
EXAMPLES = settings.default.max_examples // 2 if settings.default else 25
STOP = BadRowPolicy(stop=True, max_rows=0, quarantine=None)


def write(path: Path, columns: dict[str, Any], delimiter: str = ",") -> Path:
    """Columns of equal lengths as Parquet or CSV, by the ending."""
    if path.suffix == ".parquet":
        parquet.write_table(pa.table(columns), path)
        return path
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


def prepared(path: Path) -> Schema:
    """The schema that is guessed of a file, by which `prepare` has read the file."""
    found = guess(path, STOP)
    assert found.remarks == ()
    schema = reading.loads(found.text, "guessed.yaml")
    run_prepare([path], path.with_suffix(".rows"), schema)
    return schema


def used(schema: Schema) -> dict[str, str]:
    """What becomes of each column: its kind, transform or separator, `label` or `ignore`."""
    dense = {one.name: one.transform for one in schema.dense}
    categorical = {
        one.name: one.kind if one.max_length == 1 else f"lists of {one.kind}"
        for one in schema.categorical
    }
    return {
        schema.label: "label", **dense, **categorical, **dict.fromkeys(schema.ignore, "ignore")
    }  # fmt: skip


BASE: dict[str, Any] = {
    "y": [i % 2 for i in range(ROWS)],
    "city": [f"town {i % 7}" for i in range(ROWS)],
}
WIDE = [2**62 + i for i in range(ROWS)]
KINDS: list[tuple[str, Any, str]] = [
    ("v", pa.array([{"os": "a"}] * ROWS), "ignore"),
    ("v", pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64())), "ignore"),
    ("v", pa.array([[[1]]] * ROWS), "ignore"),
    ("v", pa.array([[0.5, 1.5], None] * (ROWS // 2)), "none"),
    ("v", pa.array([[0.5, 1.5]] * ROWS, pa.list_(pa.float32(), 2)), "none"),
    ("v", pa.array([[0.5, 1.5], [2.5]] * (ROWS // 2)), "ignore"),
    ("v", pa.array([[1.0, 2.0]] * ROWS), "lists of integer"),
    ("v", pa.array([["a", "b"]] * ROWS, pa.list_(pa.string_view())), "lists of string"),
    ("v", pa.array(["a", "b"] * (ROWS // 2), pa.string_view()), "string"),
    ("v", pa.array([b"\xff\xfe"] * ROWS, pa.binary(2)), "ignore"),
    ("v", pa.array(range(ROWS), pa.duration("s")), "ignore"),
    ("v", pa.array([datetime.date(2024, 1, 1)] * ROWS), "ignore"),
    ("v", pa.nulls(ROWS), "ignore"),
    ("v", pa.array([float("inf"), *[0.5] * (ROWS - 1)]), "ignore"),
    ("v", pa.array([1e300, *[0.5] * (ROWS - 1)]), "ignore"),
    ("v", pa.array([i % 5 for i in range(ROWS)], pa.float16()), "integer"),
    ("user_id", pa.array(WIDE), "ignore"),
    ("user_id", pa.array([2**62 + i % 9 for i in range(ROWS)]), "integer"),
    ("user_id", pa.array([2**63 + i % 9 for i in range(ROWS)], pa.uint64()), "string"),
    ("hash", pa.array([2**63 + i % 40 for i in range(ROWS)], pa.uint64()), "string"),
    ("user_id", pa.array([Decimal(i % 9) for i in range(ROWS)], pa.decimal128(20, 0)), "integer"),
    ("user_id", pa.array([Decimal(i % 9) for i in range(ROWS)], pa.decimal32(5, 0)), "integer"),
    ("user_id", pa.array([Decimal(10) ** 30 + i % 9 for i in range(ROWS)]), "string"),
    ("price", pa.array([Decimal(i) / 4 for i in range(ROWS)], pa.decimal128(9, 2)), "standardise"),
    ("v", pa.array([True, False, None] * (ROWS // 3)), "integer"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "array", "wanted"), KINDS)
def test_columns_of_parquet(tmp_path: Path, name: str, array: Any, wanted: str) -> None:
    path = write(tmp_path / "rows.parquet", {**BASE, name: array})
    assert used(prepared(path)) == {"y": "label", "city": "string", name: wanted}


def test_a_column_that_is_ignored_says_its_type(tmp_path: Path) -> None:
    device: Any = pa.array([{"os": "a", "v\n: x": 1}] * ROWS)
    path = write(tmp_path / "rows.parquet", {**BASE, "device": device, "hash": WIDE})
    text = guess(path, STOP).text
    assert '  - "device"  # struct<os: string, v : x: int64>: no type that is read\n' in text
    last = 2**62 + ROWS - 1
    assert f'- "hash"  # {2**62} to {last}, {ROWS} distinct: almost every row its own\n' in text


@pytest.mark.parametrize(
    ("values", "wanted", "seen"),
    [
        ([f"{i},{i % 10}" for i in range(ROWS)], "ignore", "numbers with decimal commas"),
        ([f"1.{i:03d},50" for i in range(ROWS)], "ignore", "numbers with decimal commas"),
        ([f"{1 + i % 28:02d}.03.2024 1{i % 9}:00" for i in range(ROWS)], "ignore", "dates that"),
        ([f"3/{1 + i % 28}/24" for i in range(ROWS)], "ignore", "dates that"),
        ([f"2024-03-{1 + i % 28:02d} 10:00:00" for i in range(ROWS)], "ignore", "times"),
        ([f"2024-03-{1 + i % 28:02d}T10:00:00.5+02:00" for i in range(ROWS)], "ignore", "times"),
        (["True", "false"] * (ROWS // 2), "integer", "are 1; another label?"),
        ([f"['town {i % 9}', 'b']" for i in range(ROWS)], "lists of string", "up to 2, 10 "),
        (['["a", 1]', "[]", "[null]"] * (ROWS // 3), "lists of string", "separator: json"),
        (["['a' 'b']"] * ROWS, "ignore", "is no list as"),  # numpy prints arrays so
        (['{"a": 1}'] * ROWS, "ignore", "objects of JSON"),
        ([f"Ann Lee {i % 9}" for i in range(ROWS)], "string", "9 distinct"),
        ([f"{2**63 + i % 40}" for i in range(ROWS)], "string", "40 distinct"),
        ([f"[{i}.5, 0.25]" for i in range(ROWS)], "none", "lists of 2 numbers"),
        ([f"{i}.5|nan|1" for i in range(1, ROWS)] + [""], "ignore", "its own, 2% missing"),
        (["", *(f"0.5 {i}e-3 1" for i in range(1, ROWS))], "none", "lists of 3 numbers, 2% mis"),
        ([f"[{i % 9}, 2]" for i in range(ROWS)], "lists of string", "up to 2, 9 distinct"),
        (["a|b", "b", "a|b|c", "c|a", ""] * (ROWS // 5), "lists of string", "lists of up to 3"),
        ([f"{i % 3}e1" for i in range(ROWS)], "integer", "0 to 20, 3 distinct"),
        ([f"{i}.5" if i % 3 else "" for i in range(ROWS)], "standardise", "33% missing"),
    ],
)  # fmt: skip
def test_columns_of_text(tmp_path: Path, values: list[str], wanted: str, seen: str) -> None:
    path = write(tmp_path / "rows.csv", {**BASE, "v": values}, ";")
    assert used(prepared(path))["v"] == wanted
    assert seen in next(line for line in guess(path, STOP).text.splitlines() if '"v"' in line)


NO_TABLES = [
    ("one\n1\n2\n", "one column 'one'"),
    ("# Title, with a comma\n\nText.\nMore text.\n", "row 1 has 1 columns instead of 2"),
    ("id,b\n" + "".join(f"{i},\n" for i in range(40)), "no column that a model can use: 'id': 0 "),
    ("a,b\n", "no rows to guess"),
    ("a,a\n1,2\n", "column 'a' is there twice"),
    ("", "empty: no header"),
]


@pytest.mark.parametrize(("text", "told"), NO_TABLES)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, told: str) -> None:
    (tmp_path / "rows.csv").write_text(text)
    with pytest.raises(DataError, match="rows.csv: ") as caught:
        guess(tmp_path / "rows.csv", STOP)
    assert told in str(caught.value)


def test_an_odd_row_is_what_prepare_says_of_it(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", BASE)
    with path.open("a") as file:
        file.write("1,Rome,3\n")
    with pytest.raises(DataError, match=r"row 61: 3 columns instead of 2 \(data.on_bad_row=error"):
        guess(path, STOP)
    text = guess(path, BadRowPolicy(stop=False, max_rows=1, quarantine=None)).text
    made = run_prepare([path], tmp_path / "out", reading.loads(text, "s"), on_bad_row="skip")
    assert made.bad_rows == 1


def test_a_file_without_a_header_has_names_in_its_schema(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    lines = [f"8{i}\t0.{i}\t{i % 2}\t1\ttown {i % 7}\t2024-03-01" for i in range(ROWS)]
    path.write_text("\n".join(lines))
    found = guess(path, STOP)
    assert len(found.remarks) == 1 and found.remarks[0].startswith("the first line looks like")
    schema = reading.loads(found.text, "s")
    assert schema.names == tuple(f"column_{i}" for i in range(1, 7))
    assert run_prepare([path], tmp_path / "out", schema).rows == ROWS
    other = tmp_path / "other.csv"  # the same names as a header are no row
    other.write_text("\n".join(["\t".join(schema.names), *lines]))
    with pytest.raises(DataError, match="row 1: the header again"):
        run_prepare([other], tmp_path / "no", schema)
    short = tmp_path / "short.csv"
    short.write_text("\n".join(line[:-11] for line in lines))
    with pytest.raises(DataError, match="row 1: 5 columns instead of 6"):
        run_prepare([short], tmp_path / "no", schema)


@pytest.mark.parametrize(
    ("header", "names"),
    [
        ("user,2019,2020", ()),  # one name of numbers is none
        (",2019,2020", ("column_1", "column_2", "column_3")),
        ("0,1,2", ()), ("1,2,3", ()),  # as pandas writes columns without names
        ("7,0.5,0", ("column_1", "column_2", "column_3")),
        ("7,0,0", ("column_1", "column_2", "column_3")),
    ],
)  # fmt: skip
def test_a_header_is_told_from_values(tmp_path: Path, header: str, names: tuple[str, ...]) -> None:
    rows = "".join(f"\n{i % 9},{i}.5,{i % 2}" for i in range(ROWS))
    (tmp_path / "rows.csv").write_text(header + rows)
    text = guess(tmp_path / "rows.csv", STOP).text
    assert yaml.safe_load(text).get("names", []) == list(names)


def test_what_only_a_person_knows_is_remarked(tmp_path: Path) -> None:
    path = write(tmp_path / "rows.csv", {"a": [i / 4 for i in range(ROWS)], "b": range(ROWS)})
    found = guess(path, STOP)
    assert isinstance(found, Guess)
    assert [one.partition(":")[0] for one in found.remarks] == [
        "no column holds nothing but 0 and 1",
        "no column looks like categories",
    ]


@pytest.mark.parametrize("rows", [2, 3, 5, 20])
def test_few_rows_have_all_parts(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "rows.csv", {name: values[:rows] for name, values in BASE.items()})
    prepared(path)


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
SIMPLE: dict[str, st.SearchStrategy[Any]] = {
    "int8": st.integers(-128, 127), "uint8": st.integers(0, 255),
    "int16": st.integers(-(2**15), 2**15 - 1), "uint16": st.integers(0, 2**16 - 1),
    "int32": st.integers(-(2**31), 2**31 - 1), "uint32": st.integers(0, 2**32 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1), "uint64": st.integers(0, 2**64 - 1),
    "float16": st.floats(width=16), "float32": st.floats(width=32), "float64": st.floats(),
    "bool_": st.booleans(), "null": st.none(),
    "string": st.text(st.characters(codec="utf-8"), max_size=9), "large_string": names,
    "string_view": names, "binary": st.binary(max_size=9), "large_binary": st.binary(max_size=9),
    "binary_view": st.binary(max_size=9), "date32": st.dates(), "date64": st.dates(),
}  # fmt: skip
TICKS = st.integers(-(2**53), 2**53)  # Parquet has a thousand of them for a second


def decimals(form: tuple[int, int]) -> tuple[Any, st.SearchStrategy[Decimal]]:
    """Decimals of so many digits, and so many of them behind the point."""
    digits, places = form
    whole = st.integers(-(10**digits) + 1, 10**digits - 1)
    kind = pa.decimal128 if digits < 38 else pa.decimal256
    return kind(*form), whole.map(lambda number: Decimal(f"{number}e-{places}"))


plain_types = st.one_of(
    st.sampled_from(list(SIMPLE)).map(lambda name: (getattr(pa, name)(), SIMPLE[name])),
    st.sampled_from(["s", "ms", "us", "ns"]).map(lambda unit: (pa.duration(unit), TICKS)),
    st.tuples(
        st.sampled_from(["s", "ms", "us", "ns"]), st.sampled_from([None, "UTC", "+02:00"])
    ).map(lambda pair: (pa.timestamp(*pair), TICKS)),
    st.sampled_from(["s", "ms"]).map(lambda unit: (pa.time32(unit), st.integers(0, 86399))),
    st.sampled_from(["us", "ns"]).map(lambda unit: (pa.time64(unit), st.integers(0, 86399))),
    st.tuples(st.sampled_from([5, 9, 18, 30, 60]), st.integers(0, 5)).map(decimals),
    st.integers(1, 9).map(lambda size: (pa.binary(size), st.binary(min_size=size, max_size=size))),
    st.just((pa.uuid(), st.binary(min_size=16, max_size=16))),
)


def nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists, structs and maps of columns."""

    def of(pair: tuple[Any, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
        kind, values = pair
        lists = st.lists(st.none() | values, max_size=4)
        fixed = st.lists(st.none() | values, min_size=2, max_size=2)
        return st.sampled_from(
            [
                (pa.list_(kind), lists),
                (pa.large_list(kind), lists),
                (pa.list_(kind, 2), fixed),
                (pa.struct([("a", kind)]), st.fixed_dictionaries({"a": values})),
                (pa.map_(pa.string(), kind), st.lists(st.tuples(st.just("a"), values), max_size=2)),
            ]
        )

    return inner.filter(lambda pair: pair[0] != pa.uuid()).flatmap(of)


types = st.recursive(plain_types, nested, max_leaves=3)


@st.composite
def columns(draw: st.DrawFn) -> Any:
    """A column of any type of Arrow: of few values, or of one for each row."""
    kind, values = draw(types)
    few = draw(st.lists(st.none() | values, min_size=1, max_size=draw(st.sampled_from([2, 40]))))
    array: Any = pa.array((few * ROWS)[:ROWS], kind)
    has_dictionary = pa.types.is_integer(kind) or pa.types.is_string(kind)
    return array.dictionary_encode() if has_dictionary and draw(st.booleans()) else array


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.dictionaries(names.filter(lambda name: name not in BASE), columns(), max_size=3))
def test_prepare_takes_what_is_guessed_of_any_columns(
    tmp_path_factory: pytest.TempPathFactory, others: dict[str, Any]
) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.parquet"
    assert set(used(prepared(write(path, {**BASE, **others})))) == {*BASE, *others}


looks = st.sampled_from(
    [
        st.integers().map(str), st.floats().map(str), st.floats().map(lambda x: f"{x:.2f}"),
        st.integers(0, 1).map(str), st.sampled_from(["true", "False", "TRUE"]),
        st.decimals(allow_nan=False, allow_infinity=False).map(str),
        st.integers(0, 9999).map(lambda x: f"{x / 100:.2f}".replace(".", ",")),
        st.datetimes().map(str), st.dates().map(str), st.dates().map(lambda x: f"{x:%d.%m.%Y}"),
        st.datetimes().map(lambda x: x.isoformat() + "Z"),
        st.datetimes().map(lambda x: f"{x:%m/%d/%Y %H:%M}"),
        st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9),
        st.lists(st.sampled_from("abc"), max_size=4).map("|".join),
        st.lists(st.sampled_from("abc"), max_size=4).map(" ".join),
        st.lists(st.sampled_from("abc"), max_size=4).map(str),
        st.lists(st.integers(0, 5) | st.none(), max_size=4).map(json.dumps),
        st.sampled_from(["NA", "n/a", "—", "\\N", "null", "nan", "None", ""]),
        st.binary(min_size=4, max_size=4).map(bytes.hex),
        st.integers(0, 2**70).map(str),
    ]
)  # fmt: skip


@st.composite
def texts(draw: st.DrawFn) -> list[str]:
    """A column of CSV that looks like one thing, or like two, with or without empty values."""
    look = st.one_of(*draw(st.lists(looks, min_size=1, max_size=2)), st.just(""))
    few = draw(st.lists(look, min_size=1, max_size=draw(st.sampled_from([3, 40]))))
    return (few * ROWS)[:ROWS]


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["a", "user_id", "Preis €", "t\tx", 'say "hi"', "l;m|n"]), texts()
    ),
    st.sampled_from(",;\t|"),
)  # fmt: skip
def test_prepare_takes_what_is_guessed_of_any_text(
    tmp_path_factory: pytest.TempPathFactory, others: dict[str, list[str]], delimiter: str
) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.csv"
    columns = {**BASE, **others}
    assert set(used(prepared(write(path, columns, delimiter)))) == set(columns)


@given(
    st.binary(max_size=200)
    | st.text('ab,;\t|"\n 019.[]{}:', max_size=150).map(str.encode)
    | st.lists(st.lists(st.sampled_from(["0", "1", "x", "", "1,5"]), min_size=2, max_size=3)).map(
        lambda rows: "\n".join(";".join(row) for row in rows).encode()
    )
)
def test_any_bytes_are_a_table_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("any") / "rows.csv"
    path.write_bytes(content)
    try:
        found = guess(path, STOP)
    except DataError as error:
        assert str(error).startswith(str(path))
        return
    if not found.remarks:
        prepared(path)
