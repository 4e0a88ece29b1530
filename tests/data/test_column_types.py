"""Columns of the same rows in other types of Arrow, and bytes that are no text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.sources.arrow import pa
from dlrm_hybrid.data.sources.files import Block
from dlrm_hybrid.data.sources.keys import MISSING_INTEGER
from dlrm_hybrid.data.sources.values import BadRow, Values, read_values
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


def read(changed: dict[str, Any]) -> tuple[Values, list[BadRow]]:
    arrays = {name: pa.array(values) for name, values in COLUMNS.items()} | changed
    rows = np.arange(1, ROWS + 1, dtype=np.int64)
    block = Block(pa.record_batch(list(arrays.values()), list(arrays)), rows, ())
    return read_values(block, SCHEMA, "a.parquet", labels=True)


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


@pytest.mark.parametrize("name", ["y", "d", "c", "k", "t"])
def test_text_that_is_not_utf8_is_a_bad_row(name: str) -> None:
    values, bad = read({name: not_text(3, 8)})
    assert [(one.row, one.column) for one in bad] == [(4, name), (9, name)]
    assert all(one.reason.endswith("is not UTF-8") for one in bad)
    assert len(values.row_N) == ROWS - 2


def test_an_empty_label_or_time_is_called_empty() -> None:
    labels, days = [str(one) for one in COLUMNS["y"]], list(DAYS)
    labels[4] = days[6] = ""
    _, bad = read({"y": pa.array(labels), "w": pa.array(days)})
    assert [(one.row, one.column, one.reason) for one in bad] == [
        (5, "y", "is empty"),
        (7, "w", "is empty"),
    ]


def test_whole_numbers_are_no_times() -> None:
    with pytest.raises(DataError, match=r"a.parquet: column 'w': int64: .*`split`.*data.schema"):
        read({"w": pa.array(range(ROWS))})
