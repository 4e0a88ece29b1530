"""Weights, labels and groups of rows: from files to batches, and faults with their place."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from table_rows import run_prepare, semantics

from dlrm_hybrid.data.loader import START, Loader, sequential_batches
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.shards import Shards, open_shards, verify
from dlrm_hybrid.types import ConfigError, DataError

ROWS = 300
LABEL = "label: "
DAYS = [datetime.date(2024, 3, 1), datetime.date(2024, 3, 2)] + 2 * [datetime.date(2023, 3, 1)]
ARRAYS = {"label.npy", "dense.npy", "ids.npy"}
SCHEMA = """
label: bought
dense: [{name: number}]
categorical: [{name: shop, kind: integer}]
ignore: [other]
split: {by: fraction, validation: 0.2, test: 0.2, seed: 3}
"""


def schema(more: str = "weight: other\n") -> Schema:
    return schemas.loads(SCHEMA.replace("ignore: [other]\n", more), "mine.yaml")


def columns(other: Any) -> dict[str, Any]:
    """Each row has its number, so that it is found again after a split and a shuffle."""
    draw = np.random.default_rng(0)
    return {
        "bought": draw.integers(0, 2, ROWS),
        "number": np.arange(ROWS),
        "shop": draw.integers(0, 9, ROWS),
        "other": other,
    }


def weights() -> np.ndarray:
    drawn = np.random.default_rng(1).exponential(size=ROWS).astype(np.float32)
    drawn[::7] = 0
    return drawn


def prepared(folder: Path, other: Any, **options: Any) -> Shards:
    pq.write_table(pa.table(columns(other)), folder / "rows.parquet")
    run_prepare([folder / "rows.parquet"], folder / "out", schema(), **options)
    return open_shards(folder / "out", semantics(schema(), options.get("on_bad_row", "error")))


def test_each_row_keeps_its_weight_in_batches_of_any_order(tmp_path: Path) -> None:
    shards = prepared(tmp_path, weights())
    verify(shards, lambda done: None)
    loader = Loader(
        shards, batch_size=7, seed=5, shuffle=True, shuffle_block_rows=50, shuffle_read_rows=10
    )
    batches, state = list(sequential_batches(shards, range(ROWS), 41)), START
    for _ in range(2 * loader.steps_per_epoch):
        batch, state = loader.read(state)
        batches.append(batch)
    for batch in batches:
        number_B = batch.dense_BI[:, 0].astype(int)
        assert batch.weight_B is not None
        np.testing.assert_array_equal(batch.weight_B, weights()[number_B])
        some = batch.part(slice(1, 3))
        assert some.weight_B is not None and len(some.weight_B) == len(some.label_B) == 2
    sums = [batch.weight_B.sum() for batch in batches if batch.weight_B is not None]
    assert len(set(sums)) > ROWS / 10


def test_csv_has_the_same_weights_and_arrays_without_are_as_they_were(tmp_path: Path) -> None:
    prepared(tmp_path, weights())
    pa_csv.write_csv(pa.table(columns(weights())), tmp_path / "rows.csv")
    run_prepare([tmp_path / "rows.csv"], tmp_path / "csv", schema())
    plain = schema("ignore: [other]\n")
    made = run_prepare([tmp_path / "rows.parquet"], tmp_path / "plain", plain)
    assert [one.file for one in made.arrays] == ["label.npy", "dense.npy", "ids.npy"]
    assert not (tmp_path / "plain" / "weight.npy").exists()
    for name in ("label", "dense", "ids", "weight"):
        wanted = (tmp_path / "out" / f"{name}.npy").read_bytes()
        assert (tmp_path / "csv" / f"{name}.npy").read_bytes() == wanted
        if name != "weight":
            assert (tmp_path / "plain" / f"{name}.npy").read_bytes() == wanted
    assert plain.beside_repr == [] and schema().beside_repr == ["other", None, None]
    assert repr(plain) == repr(schema()).replace("ignore=()", "ignore=('other',)")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-0.5, "-0.5 is no weight: it must be finite and at least 0"),
        (float("inf"), "inf is no weight"),
        (1e39, r"1e\+39 is no weight"),
        (None, "is empty"),
        ("much", r"'much' is not a number"),
    ],
)
def test_a_bad_weight_is_a_bad_row(value: Any, reason: str, tmp_path: Path) -> None:
    other: list[Any] = weights().tolist()
    other[6] = value
    if isinstance(value, str):
        other = [str(one) for one in other]
    with pytest.raises(DataError, match=rf"rows.parquet: row 7: column 'other': {reason}"):
        prepared(tmp_path, other)
    shards = prepared(tmp_path, other, on_bad_row="skip")
    assert (shards.manifest.rows, shards.manifest.bad_rows) == (ROWS - 1, 1)
    assert shards.rows.weight_R is not None
    assert shards.rows.weight_R.sum() == pytest.approx(weights().sum() - weights()[6], rel=1e-6)


def test_a_part_without_any_weight_is_refused(tmp_path: Path) -> None:
    shards = prepared(tmp_path, weights())
    other = weights()
    tested = shards.rows.dense_RI[shards.test_rows("day").start :, 0].astype(int)
    other[tested] = 0
    (tmp_path / "again").mkdir()
    message = r"column 'other': no row of the part `test` has a weight above 0 \(weight, data.sch"
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / "again", other)


@pytest.mark.parametrize("bad", [-1.0, np.nan, np.inf])
def test_a_damaged_weight_is_found_where_it_is_read(bad: float, tmp_path: Path) -> None:
    shards = prepared(tmp_path, weights())
    stored = np.load(tmp_path / "out" / "weight.npy", mmap_mode="r+")
    stored[3] = bad
    stored.flush()
    with pytest.raises(DataError, match=r"weight.npy: row 3 .*: weight -?(1|nan|inf) is not finit"):
        list(sequential_batches(shards, range(ROWS), 41))
    with pytest.raises(DataError, match=r"weight.npy: rows 0 to 299 .*: checksum differs"):
        verify(shards, lambda done: None)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("weight: bought\n", "weight = 'bought': is label too"),
        ("weight: shop\n", r"categorical\[0\].name = 'shop': is weight too"),
        ("weight: other\nignore: [other]\n", r"ignore\[0\] = 'other': is weight too"),
        ("weight: 3\n", "weight = 3: must be a valid string"),
        ("weight: other\nformat: criteo\n", "weight: not with format: criteo"),
        ("group: shop\nformat: criteo\n", "group: not with format: criteo"),
        ("group: [shop]\n", "group = \\['shop'\\]: must be a valid string"),
        (LABEL + "{column: y}", "label: 'y' needs either `positive` or `above`"),
        (LABEL + "{column: y, positive: [a], above: 1}", "label: 'y' needs either `positive` or"),
        (LABEL + "{column: shop, above: 1}", r"categorical\[0\].name = 'shop': is label too"),
        (LABEL + "{column: y, positive: []}", r"label.positive = \[\]: .* at least 1 item"),
        (
            LABEL + "{column: y, positive: [yes]}",
            r"label.positive\[0\] = True: must be a valid str",
        ),
        (LABEL + "{column: y, above: .nan}", "label.above = nan: must be a finite number"),
        (LABEL + "{column: y, upon: 1}", "mine.yaml: label.upon: unknown key$"),
        (LABEL + "{above: 1}", "mine.yaml: label.column: missing$"),
        (LABEL + "3", "label = 3: must be "),
        (LABEL + "{column: y, above: 1}\nformat: criteo", "label: not with format: criteo"),
    ],
)
def test_faults_of_the_schema_name_its_keys(more: str, message: str) -> None:
    text = SCHEMA.replace("label: bought", "") if LABEL in more else SCHEMA
    with pytest.raises(ConfigError, match=message):
        schemas.loads(text.replace("ignore: [other]\n", f"{more}\n"), "mine.yaml")


@pytest.mark.parametrize(
    ("label", "other", "expected"),
    [
        (
            "{column: other, positive: [click, buy]}",
            ["view", "click", "buy", "Click"],
            [0, 1, 1, 0],
        ),
        ("{column: other, positive: [7, x]}", ["7", "x", "07", "7.0"], [1, 1, 0, 0]),
        ("{column: other, positive: [7, x]}", [7, -7, 70, 0], [1, 0, 0, 0]),
        ("{column: other, positive: ['true']}", [True, False, False, True], [1, 0, 0, 1]),
        ("{column: other, positive: ['2024-03-01']}", DAYS, [1, 0, 0, 0]),
        ("{column: other, above: 3.5}", [3.5, 3.6, -1, 1e300], [0, 1, 0, 1]),
        ("{column: other, above: 0}", ["1", "0", " 2e0 ", "-3"], [1, 0, 1, 0]),
        ("{column: other, above: 0.5}", [True, False, False, True], [1, 0, 0, 1]),
    ],
)
@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_a_label_is_made_of_a_column(
    label: str, other: list[Any], expected: list[int], kind: str, tmp_path: Path
) -> None:
    table = pa.table(columns(other * (ROWS // 4)) | {"bought": [None] * ROWS})
    path = tmp_path / f"rows.{kind}"
    pq.write_table(table, path) if kind == "parquet" else pa_csv.write_csv(table, path)
    text = SCHEMA.replace("bought", label).replace("[other]", "[bought]")
    run_prepare([path], tmp_path / "out", schemas.loads(text, "mine.yaml"))
    shards = open_shards(tmp_path / "out", semantics(schemas.loads(text, "mine.yaml")))
    wanted = np.array(expected)[shards.rows.dense_RI[:, 0].astype(int) % 4]
    assert shards.rows.label_R.tolist() == wanted.tolist()
    assert {one.name for one in (tmp_path / "out").glob("*.npy")} == ARRAYS


@pytest.mark.parametrize(
    ("label", "value", "reason"),
    [
        ("{column: other, positive: [a]}", None, "is empty"),
        ("{column: other, positive: [a]}", "", "is empty"),
        ("{column: other, above: 1}", "b", "'b' is not a number"),
        ("{column: other, above: 1}", "nan", "'nan' is neither 0 nor 1"),
        ("{column: other, above: 1}", "", "is empty"),
    ],
)
def test_a_label_that_is_none_is_a_bad_row(
    label: str, value: Any, reason: str, tmp_path: Path
) -> None:
    other: list[Any] = ["1", "3"] * (ROWS // 2)
    other[4] = value
    pq.write_table(pa.table(columns(other)), tmp_path / "rows.parquet")
    text = SCHEMA.replace("bought", label).replace("[other]", "[bought]")
    with pytest.raises(DataError, match=rf"row 5: column 'other': ({reason})"):
        run_prepare([tmp_path / "rows.parquet"], tmp_path / "out", schemas.loads(text, "mine.yaml"))


def test_values_that_make_no_label_are_named(tmp_path: Path) -> None:
    other = ["buy", "a"] * (ROWS // 2 - 1) + ["late", "a"]
    pq.write_table(pa.table(columns(other)), tmp_path / "rows.parquet")
    pq.write_table(pa.table(columns(["a", "b"] * (ROWS // 2))), tmp_path / "more.parquet")
    paths = [tmp_path / "more.parquet", tmp_path / "rows.parquet"]
    for label, told in (
        ("{column: other, positive: [clik, buy, 7, late]}", ["'7' or 'clik'"]),
        ("{column: other, positive: [buy, late]}", []),
    ):
        found: list[str] = []
        text = SCHEMA.replace("bought", label).replace("[other]", "[bought]")
        schema = schemas.loads(text, "mine.yaml")
        run_prepare(paths, tmp_path / f"out{len(told)}", schema, say=found.append)
        remarks = [f"  no row has other = {names} (positive, data.schema)" for names in told]
        assert [line for line in found if "no row" in line] == remarks


def test_floats_are_no_texts_to_choose_from(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns([0.5, 1.0] * (ROWS // 2))), tmp_path / "rows.parquet")
    text = SCHEMA.replace("bought", "{column: other, positive: [1]}")
    found = schemas.loads(text.replace("[other]", "[bought]"), "mine.yaml")
    with pytest.raises(DataError, match="'other': double: `positive` takes .* use `above`"):
        run_prepare([tmp_path / "rows.parquet"], tmp_path / "out", found)


def grouped(folder: Path, users: Any, more: str = "group: other\n", split: str = "") -> Shards:
    pq.write_table(pa.table(columns(users)), folder / "rows.parquet")
    text = SCHEMA.replace("ignore: [other]\n", more).replace("seed: 3", f"seed: 3{split}")
    found = schemas.loads(text, "mine.yaml")
    run_prepare([folder / "rows.parquet"], folder / "out", found)
    shards = open_shards(folder / "out", semantics(found))
    verify(shards, lambda done: None)
    return shards


def partition(keys: list[Any]) -> list[int]:
    """The first place of each key: equal for equal groups, whatever they are called."""
    return [keys.index(key) for key in keys]


TEXTS = [f"u{one % 40}" for one in range(ROWS)]
NUMBERS = [one % 40 for one in range(ROWS)]


@pytest.mark.parametrize(
    "users",
    [
        TEXTS,
        NUMBERS,
        [float(one) for one in NUMBERS],
        pa.array(TEXTS).dictionary_encode(),
        [datetime.date(2024, 1, 1) + datetime.timedelta(one) for one in NUMBERS],
    ],
    ids=["texts", "integers", "whole floats", "dictionary", "dates"],
)
def test_batches_to_score_know_the_groups_of_their_rows(users: Any, tmp_path: Path) -> None:
    shards = grouped(tmp_path, users)
    batches = list(sequential_batches(shards, range(ROWS), 41))
    groups = [one for batch in batches if batch.group_B is not None for one in batch.group_B]
    numbers = [int(one) for batch in batches for one in batch.dense_BI[:, 0]]
    assert partition(groups) == partition([NUMBERS[one] for one in numbers])
    assert 0 not in groups
    assert batches[0].part(slice(2, 5)).outcomes.group_B.tolist() == groups[2:5]  # type: ignore
    loader = Loader(
        shards, batch_size=7, seed=5, shuffle=True, shuffle_block_rows=50, shuffle_read_rows=10
    )
    assert loader.read(START)[0].group_B is None  # training needs none


@pytest.mark.parametrize(
    ("users", "reason"),
    [
        ([0.5, 1.0] * 150, "row 1: column 'other': 0.5 is not an integer"),
        ([[1], [2]] * 150, "column 'other': .*list"),
        (pa.array([1, 2] * 150, pa.duration("s")), "column 'other': .*no categories are of this"),
    ],
)
def test_what_groups_no_rows_is_refused(users: Any, reason: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=reason):
        grouped(tmp_path, users)


@pytest.mark.parametrize("more", ["ignore: [other]\n", "group: other\n", "weight: other\n"])
def test_all_rows_of_a_user_are_in_one_part(more: str, tmp_path: Path) -> None:
    shards = grouped(tmp_path, NUMBERS, more, ", column: other")
    number_R = shards.rows.dense_RI[:, 0].astype(int)
    parts = [shards.train_rows, shards.validation_rows, shards.test_rows("day")]
    users = [{NUMBERS[one] for one in number_R[part.start : part.stop]} for part in parts]
    assert sum(map(len, users)) == len(set().union(*users)) == 40
    assert 15 <= len(users[0]) <= 33 and users[1] and users[2]
    # By the value alone, whatever its rows' numbers are.
    columns_backwards = {name: one[::-1] for name, one in columns(np.array(NUMBERS)).items()}
    pq.write_table(pa.table(columns_backwards), tmp_path / "back.parquet")
    run_prepare([tmp_path / "back.parquet"], tmp_path / "back", shards.schema)
    again = open_shards(tmp_path / "back", None)
    tested = again.rows.dense_RI[again.test_rows("day").start :, 0].astype(int)
    assert {NUMBERS[one] for one in tested} == users[2]


def test_rows_without_a_user_are_drawn_by_their_numbers(tmp_path: Path) -> None:
    users = [None if one % 3 else f"u{one % 40}" for one in range(ROWS)]
    shards = grouped(tmp_path, users, split=", column: other")
    (tmp_path / "plain").mkdir()
    plain = grouped(tmp_path / "plain", users)
    for found, rows in ((shards, 0), (plain, 0)):
        assert found.rows.group_R is not None
        assert (found.rows.group_R == 0).sum() == 200, rows
    tested = [
        {int(one) for one in found.rows.dense_RI[found.test_rows("day").start :, 0] if one % 3}
        for found in (shards, plain)
    ]
    assert tested[0] == tested[1] and 20 < len(tested[0]) < 60
