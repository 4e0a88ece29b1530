"""Columns of the same rows in other types of Arrow, and bytes that are no text."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.sources.arrow import pa, pc, plain
from dlrm_hybrid.data.sources.cells import MISSING_INTEGER, instant, keys_of, plain_value
from dlrm_hybrid.data.sources.columns import Values
from dlrm_hybrid.data.sources.files import BadRow, Block
from dlrm_hybrid.data.sources.values import _time, read_values
from dlrm_hybrid.types import DataError

ROWS = 300
SCHEMA = schemas.loads(
    """
label: y
dense: [{name: d, missing: 7}]
categorical:
  - {name: c}
  - {name: k, kind: integer}
  - {name: t, max_length: 3, separator: "|"}
split: {by: time, column: w, test_from: "2024-01-05"}
""",
    "s.yaml",
)
AMOUNTS = [None if i % 5 == 0 else i / 2 for i in range(ROWS)]
WORDS = [None if i % 6 == 0 else f"é{i % 128}" for i in range(ROWS)]
NUMBERS = [None if i % 7 == 0 else i % 9 for i in range(ROWS)]
LISTS = ["|".join(f"t{j}" for j in range(i % 4)) for i in range(ROWS)]
DAYS = [f"2024-01-{1 + i % 9:02d}" for i in range(ROWS)]
COLUMNS: dict[str, list[Any]] = {
    "y": [i % 2 for i in range(ROWS)],
    "d": AMOUNTS,
    "c": WORDS,
    "k": NUMBERS,
    "t": LISTS,
    "w": DAYS,
}


def read(changed: dict[str, Any], schema: Schema = SCHEMA) -> tuple[Values, list[BadRow]]:
    arrays = {name: pa.array(values) for name, values in COLUMNS.items()} | changed
    rows = np.arange(1, ROWS + 1, dtype=np.int64)
    block = Block(pa.record_batch(list(arrays.values()), list(arrays)), rows, ())
    return read_values(block, schema, "a.parquet", labels=True)


def told(values: Values) -> list[Any]:
    assert values.label_N is not None and values.time_N is not None
    categories: list[Any] = [
        ([one.keys[index] for index in one.index_M.tolist()], np.asarray(one.length_N).tolist())
        for one in values.categories
    ]
    return [
        values.label_N.tolist(), values.dense_NI.tolist(), values.time_N.tolist(), categories
    ]  # fmt: skip


def not_text(*at: int) -> Any:
    """Text in which some values are no UTF-8, as a Parquet file may have it."""
    given = [b"\xff\xe9" if i in at else b"1" for i in range(ROWS)]
    _, offsets, content = pa.array(given).buffers()
    return pa.StringArray.from_buffers(ROWS, offsets, content)


def small_dictionary(values: list[Any]) -> Any:
    """Indices of 8 bits, all of which are taken."""
    words = [f"é{i}" for i in range(128)]
    indices = [None if one is None else words.index(one) for one in values]
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int8()), words)


@pytest.mark.parametrize(
    "changed",
    [
        {"k": pa.array([None if one is None else float(one) for one in NUMBERS])},
        {"k": pa.array([float("nan") if one is None else float(one) for one in NUMBERS])},
        {"k": pa.array([None if one is None else f"{one}.0" for one in NUMBERS])},
        {"d": pa.array(["" if one is None else str(one) for one in AMOUNTS])},
        {"d": pa.array([None if one is None else str(one) for one in AMOUNTS]).dictionary_encode()},
        {"c": small_dictionary(WORDS)},
        {"c": pa.array(WORDS, pa.string_view())},
        {"t": pa.array(LISTS).dictionary_encode(), "w": pa.array(DAYS).dictionary_encode()},
        {"t": pa.array([one.split("|") if one else [] for one in LISTS])},
        {"y": pa.array([str(i % 2) for i in range(ROWS)]).dictionary_encode()},
    ],
)
def test_other_types_say_the_same(changed: dict[str, Any]) -> None:
    values, bad = read(changed)
    assert not bad
    assert told(values) == told(read({})[0])
    assert values.categories[1].keys[values.categories[1].index_M[0]] == MISSING_INTEGER


@pytest.mark.parametrize("spelled", ["true false", "True False", "TRUE FALSE", "typed"])
def test_truth_values_are_one_and_zero_and_one_category(spelled: str) -> None:
    words: list[Any] = [True, False] if spelled == "typed" else spelled.split()
    given = pa.array([words[i % 2] for i in range(ROWS)])
    values, bad = read(dict.fromkeys("ydkct", given) if spelled != "typed" else {
        **dict.fromkeys("ydkc", given), "t": pa.array([[words[i % 2]] for i in range(ROWS)])
    })  # fmt: skip
    assert not bad and values.label_N is not None
    assert values.label_N.tolist() == values.dense_NI[:, 0].tolist() == [1, 0] * (ROWS // 2)
    text, whole, lists = (
        [one.keys[index] for index in one.index_M.tolist()] for one in values.categories
    )
    assert whole == [1, 0] * (ROWS // 2) and text == lists == ["True", "False"] * (ROWS // 2)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (" 3 ", 3.0), ("+.5", 0.5), ("1e-400", 0.0), ("nan", 7.0), ("", 7.0), (5 * "0" + "1", 1.0),
        ("3e38", 3e38), ("1e39", "is outside 32 bits"), ("-1e39", "is outside 32 bits"),
        ("1e400", "is infinite"), ("9" * 400, "is infinite"), ("-inf", "is infinite"),
        ("1_000", "is not a number"), ("0x10", "is not a number"), ("１２", "is not a number"),
        ("-nan", "is not a number"), ("nan(1)", "is not a number"), ("1,5", "is not a number"),
        ("t", "is not a number"), ("\u00a03", "is not a number"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("beside", ["1", "TRUE"])  # with which Arrow reads all of a column, or not
def test_text_is_a_number_whatever_stands_beside_it(text: str, wanted: Any, beside: str) -> None:
    values, bad = read({"d": pa.array([text, *[beside] * (ROWS - 1)])})
    if isinstance(wanted, str):
        assert [one.row for one in bad] == [1] and f" {wanted}" in bad[0].reason
    else:
        assert not bad and values.dense_NI[0, 0] == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("1e3", 1000), ("1.5e1", 15), ("9.223372036854775807E18", 2**63 - 1), (1e18, 10**18),
        (Decimal("5.00"), 5), ("True", 1), (" -0 ", 0), ("9" * 20, None), ("1e999999999999", None),
        ("1e-400", None), ("1.5", None), (2.5, None), (Decimal("2.5"), None), ("1_0", None),
        ("nan", None), ("inf", None), (np.int64(5), 5), (np.float32(2), 2), (np.bool_(True), 1),
        pytest.param(10**5000, None, id="5,001 digits"),
    ],
)  # fmt: skip
def test_whole_numbers_in_all_spellings(given: Any, wanted: int | None) -> None:
    keys, faults = keys_of([plain_value(given)], SCHEMA.categorical[1])
    if wanted is None:
        assert "is not an integer of 64 bits" in faults[0]
    else:
        assert (keys, faults) == ([wanted], {})


def test_words_are_missing_values_in_every_column() -> None:
    schema = replace(SCHEMA, missing_values=("NA", "—", r"\N"))
    words = ["NA", "—", r"\N", "3"]
    given = pa.array([words[i % 4] for i in range(ROWS)])
    lists = pa.array([[words[i % 4], "x", words[(i + 1) % 4]] for i in range(ROWS)])
    for text in (given, given.dictionary_encode()):
        values, bad = read({"d": text, "c": text, "k": text, "t": lists}, schema)
        assert not bad and values.dense_NI[:4, 0].tolist() == [7, 7, 7, 3]
        text_keys, whole, tags = (
            [one.keys[index] for index in one.index_M.tolist()] for one in values.categories
        )
        assert text_keys[:4] == ["", "", "", "3"]
        assert whole[:4] == [*[MISSING_INTEGER] * 3, 3]
        assert tags[:5] == ["x", "x", "x", "3", "3"]
    _, bad = read({"y": given, "w": given}, schema)
    assert [one.reason for one in bad[:4]] == [*["is empty"] * 3, "'3' is neither 0 nor 1"]


LONG = [["a", "b", "c", "d"], [], ["e"], ["f", "", "g", "h"], ["i", "j", "k"]]


@pytest.mark.parametrize(
    ("truncate", "wanted"),
    [("first", ["a", "b", "c", "e", "f", "g", "i", "j", "k"]),
     ("last", ["b", "c", "d", "e", "g", "h", "i", "j", "k"])],
)  # fmt: skip
@pytest.mark.parametrize("is_text", [False, True])
def test_long_lists_are_cut_where_the_schema_says_so(
    truncate: Any, wanted: list[str], is_text: bool
) -> None:
    column = replace(SCHEMA.categorical[2], truncate=truncate)
    schema = replace(SCHEMA, categorical=(*SCHEMA.categorical[:2], column))
    lists = [LONG[i % 5] for i in range(ROWS)]
    given = pa.array(["|".join(one) for one in lists] if is_text else lists)
    values, bad = read({"t": given}, schema)
    tags = values.categories[2]
    assert not bad and [tags.keys[index] for index in tags.index_M[:9]] == wanted
    assert tags.length_N is not None
    assert tags.length_N[:5].tolist() == [3, 0, 1, 2, 3]
    _, bad = read({"t": given})
    assert {one.reason for one in bad} == {"4 values, max_length = 3"}


def test_a_column_without_any_value_may_be_of_any_type() -> None:
    for array in (
        pa.nulls(ROWS),
        pa.nulls(ROWS, pa.float64()),
        pa.nulls(ROWS, pa.list_(pa.int8())),
    ):
        values, bad = read({"d": array, "c": array, "k": array, "t": array})
        assert not bad and set(values.dense_NI[:, 0]) == {7}
        assert not values.categories[2].index_M.size


@pytest.mark.parametrize("name", ["y", "d", "c", "k", "t"])
def test_text_that_is_not_utf8_is_a_bad_row(name: str) -> None:
    values, bad = read({name: not_text(3, 8)})
    assert [(one.row, one.column) for one in bad] == [(4, name), (9, name)]
    assert all("is not UTF-8: save text in UTF-8" in one.reason for one in bad)
    assert len(values.row_N) == ROWS - 2


def test_an_empty_label_or_time_is_called_empty() -> None:
    labels, days = [str(one) for one in COLUMNS["y"]], list(DAYS)
    labels[4] = days[6] = ""
    _, bad = read({"y": pa.array(labels), "w": pa.array(days)})
    assert [(one.row, one.column, one.reason) for one in bad] == [
        (5, "y", "is empty"),
        (7, "w", "is empty"),
    ]


IDS = [2**63 + i % 7 for i in range(ROWS)]
UUIDS = [UUID(int=i % 7) for i in range(ROWS)]
MOMENTS = [datetime(2024, 1, 1, 8, 0, i % 60) for i in range(ROWS)]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array(IDS, pa.uint64()), list(map(str, IDS))),
        (pa.array(list(map(Decimal, IDS)), pa.decimal128(20, 0)), list(map(str, IDS))),
        (pa.array([Decimal(i % 9) / 4 for i in range(ROWS)], pa.decimal64(9, 2)),
         [f"{i % 9 / 4:.2f}" for i in range(ROWS)]),
        (pa.array([date(2024, 1, 1 + i % 30) for i in range(ROWS)]),
         [f"2024-01-{1 + i % 30:02d}" for i in range(ROWS)]),
        (pa.array([time(8, 0, i % 60) for i in range(ROWS)], pa.time64("us")),
         [f"08:00:{i % 60:02d}" for i in range(ROWS)]),
        (pa.array(MOMENTS, pa.timestamp("ns")), [str(one) for one in MOMENTS]),
        (pa.array(MOMENTS, pa.timestamp("ms", "Europe/Rome")), [str(one) for one in MOMENTS]),
        (pa.array([one.bytes for one in UUIDS], pa.uuid()), list(map(str, UUIDS))),
        (pa.array([one.hex.encode() for one in UUIDS], pa.binary(32)), [one.hex for one in UUIDS]),
        (pa.array(WORDS, pa.large_string()).dictionary_encode(), WORDS),
    ],
)  # fmt: skip
def test_a_category_is_the_text_that_it_is_in_csv(array: Any, text: list[str]) -> None:
    values, bad = read({"c": array})
    assert not bad
    assert told(values) == told(read({"c": pa.array(text)})[0])


def test_wide_decimals_are_integers_where_they_fit() -> None:
    small = [None if one is None else Decimal(one) for one in NUMBERS]
    values, bad = read({"k": pa.array(small, pa.decimal256(50, 1))})
    assert not bad and told(values) == told(read({})[0])
    _, bad = read({"k": pa.array([Decimal(10) ** 30] * ROWS, pa.decimal256(50, 1))})
    assert "is not an integer of 64 bits (kind: string takes" in bad[0].reason


LABELS = [str(i % 2) for i in range(ROWS)]
SPOILT = ["2", *LABELS[1:]]


@pytest.mark.parametrize(
    "kind",
    [
        pa.string_view(), pa.binary_view(), pa.large_string(), pa.large_binary(), pa.binary(1),
        pa.dictionary(pa.int8(), pa.string_view()), pa.dictionary(pa.int8(), pa.binary(1)),
    ],
)  # fmt: skip
def test_a_bad_row_is_left_out_beside_text_of_any_type(kind: Any) -> None:
    if pa.types.is_dictionary(kind):
        words = pa.array([b"0", b"1", b"2"], kind.value_type)
        array = pa.DictionaryArray.from_arrays(pa.array(list(map(int, SPOILT)), pa.int8()), words)
    else:
        array = pa.array([one.encode() for one in SPOILT], kind)
    values, bad = read({"y": array, "c": array, "t": array})
    assert [(one.row, one.column) for one in bad] == [(1, "y")]
    assert len(values.row_N) == ROWS - 1
    views = pa.array([one.split("|") for one in LISTS], pa.list_(pa.string_view()))
    assert told(read({"t": views})[0]) == told(read({})[0])


ANY = {
    "null": pa.nulls(ROWS),
    "bool": pa.array([i % 2 == 0 for i in range(ROWS)]),
    "half": pa.array(np.arange(ROWS, dtype=np.float16)),
    "duration": pa.array(range(ROWS), pa.duration("ns")),
    "far time": pa.array([2**62] * ROWS, pa.timestamp("us")),
    "struct": pa.array([{"a": i} for i in range(ROWS)]),
    "map": pa.array([[("a", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int64())),
    "list of lists": pa.array([[[i]] for i in range(ROWS)]),
    "list of structs": pa.array([[{"a": i}] for i in range(ROWS)]),
    "list of times": pa.array([[date(2024, 1, 1)]] * ROWS),
    "fixed list": pa.array([[0.5, 1.5]] * ROWS, pa.list_(pa.float32(), 2)),
    "list view": pa.array([["a"]] * ROWS, pa.list_view(pa.string())),
    "runs": pc.run_end_encode(pa.array([1] * ROWS)),
    "interval": pa.array([(1, 1, 1)] * ROWS, pa.month_day_nano_interval()),
    "views in a struct": pa.array([{"a": "b"}] * ROWS, pa.struct([("a", pa.string_view())])),
}  # fmt: skip


@pytest.mark.parametrize("name", list(COLUMNS))
@pytest.mark.parametrize("kind", list(ANY))
def test_a_column_of_any_type_is_read_or_named(name: str, kind: str) -> None:
    labels = [*COLUMNS["y"][1:], 2]  # one bad row, without which all others are read again
    try:
        values, bad = read({"y": pa.array(labels), name: ANY[kind]})
    except DataError as error:
        assert f"a.parquet: column {name!r}: " in str(error)
    else:
        assert len(values.row_N) + len(bad) == ROWS


INSTANT = 1704067200_123456  # microseconds


@pytest.mark.parametrize(
    "values",
    [
        ["2024-01-01 00:00:00.123456"],
        ["2024-01-01T00:00:00.123456Z"],
        ["2024-01-01 02:00:00.123456+02:00", "2023-12-31T19:00:00.123456-0500"],
        ["2024-01-01T00:00:00.123456789", "2024-01-01T00:00:00.123456Z"],
        ["2024-01-01 00:00:00.123456789+00:00"],
        ["2024-01-01 00:00:00,123456 UTC", "20240101"],
        ["2024-01-01 00:00:00.123456", "1e999999999999"],
        ["1704067200.123456", "1704067200123.456", "1704067200123456", "1704067200123456999"],
        [1704067200123456, 1704067200123456789, 5],
        [1704067200.123456, float("nan")],
        pa.array([INSTANT], pa.timestamp("us")),
        pa.array([INSTANT * 1000 + 999], pa.timestamp("ns", "Europe/Rome")),
        pa.array([INSTANT], pa.timestamp("us", "America/New_York")).dictionary_encode(),
    ],
)
def test_times_are_instants(values: Any) -> None:
    array = values if isinstance(values, pa.Array) else pa.array(values)
    found, bad = _time(plain(array), is_instant=True)
    good = [index for index in range(len(array)) if index not in bad]
    assert good and len(bad) <= 1
    assert {int(found[index]) for index in good} == {INSTANT}


DAY = 24 * 3600 * 10**6


@pytest.mark.parametrize(
    "array",
    [
        pa.array(["2024-01-01", "2024-01-01T24:00:00", None]),
        pa.array(["2024-01-01T00:00+00", "2024-01-02T00Z", ""]),
        pa.array([19723, 19724, None], pa.date32()),
        pa.array([1704067200, 1704067200 + 86400, None]),
        pa.array([1704067200, 1704067200 + 86400, None], pa.timestamp("s")),
        pa.array(["1704067200", "1704153600.0", None]),
    ],
)
def test_days_are_instants(array: Any) -> None:
    found, bad = _time(plain(array), is_instant=True)
    assert found[:2].tolist() == [19723 * DAY, 19724 * DAY] and bad == {2: "is empty"}


def test_times_before_1970_are_cut_off_downwards() -> None:
    for array in (pa.array([-1], pa.timestamp("ns")), pa.array(["1969-12-31T23:59:59.999999999"])):
        assert _time(plain(array), is_instant=True).values.tolist() == [-1]


moments = st.datetimes(datetime(1700, 1, 1), datetime(2200, 1, 1))
zones = st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))


@given(moments, zones, st.sampled_from(" T"))
def test_any_time_is_its_instant(when: datetime, zone: timezone, between: str) -> None:
    aware = when.replace(tzinfo=UTC).astimezone(zone)
    text = aware.isoformat(between)
    wanted = (when - datetime(1970, 1, 1)) // timedelta(microseconds=1)
    assert instant(text) == instant(when.isoformat(between)) == wanted
    typed = pa.array([when], pa.timestamp("us", "UTC"))
    assert _time(typed, is_instant=True).values.tolist() == [wanted]
    assert _time(plain(pa.array([text])), is_instant=True).values.tolist() == [wanted]


@given(st.text() | st.text("0123456789-:TZ+., e"))
def test_any_text_is_a_time_for_arrow_only_as_it_is_one_here(text: str) -> None:
    found, bad = _time(plain(pa.array([text])), is_instant=True)
    wanted = instant(text)
    if wanted is None:
        assert bad
    elif abs(wanted) < 2**63:
        assert not bad and found.tolist() == [wanted]


def test_small_whole_numbers_are_no_times() -> None:
    _, bad = read({"w": pa.array(range(ROWS))})
    assert len(bad) == ROWS
    assert bad[20].reason.startswith("20 is not a time as 2024-03-01 12:00:00")
    with pytest.raises(DataError, match=r"a.parquet: column 'w': list.*no times are of this type"):
        read({"w": pa.array([[1]] * ROWS)})
