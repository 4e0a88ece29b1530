"""Several labels of a row: from files to batches, and faults with their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
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
from dlrm_hybrid.run.readiness import label_remarks
from dlrm_hybrid.types import ConfigError, DataError

ROWS = 300
LABELS = """
label:
  - clicked
  - {column: stars, above: 3, name: liked, loss_weight: 0.5}
  - {column: action, positive: [buy, order], loss_weight: 2}
  - {column: stars, above: 4}
"""
SCHEMA = """
dense: [{name: number}]
categorical: [{name: shop, kind: integer}]
split: {by: fraction, validation: 0.2, test: 0.2, seed: 3}
"""
WEIGHTS = {"clicked": 1.0, "liked": 0.5, "action": 2.0, "stars": 1.0}


def schema(labels: str = LABELS) -> Schema:
    return schemas.loads(labels + SCHEMA, "mine.yaml")


def columns() -> dict[str, list[Any]]:
    """Each row has its number, so that it is found again after a split and a shuffle."""
    draw = np.random.default_rng(0)
    actions = ["view", "buy", "order", "Buy"]
    return {
        "clicked": draw.integers(0, 2, ROWS).tolist(),
        "stars": draw.integers(1, 6, ROWS).tolist(),
        "action": [actions[one] for one in draw.integers(0, 4, ROWS)],
        "number": [*range(ROWS)],
        "shop": draw.integers(0, 9, ROWS).tolist(),
    }


def expected() -> np.ndarray:
    rows = columns()
    stars = np.array(rows["stars"])
    bought = [one in ("buy", "order") for one in rows["action"]]
    return np.array([rows["clicked"], stars > 3, bought, stars > 4], np.float32).T


def prepared(folder: Path, rows: Mapping[str, Any], **options: Any) -> Shards:
    pq.write_table(pa.table(dict(rows)), folder / "rows.parquet")
    run_prepare([folder / "rows.parquet"], folder / "out", schema(), **options)
    return open_shards(folder / "out", semantics(schema(), options.get("on_bad_row", "error")))


def test_each_row_keeps_its_labels_in_batches_of_any_order(tmp_path: Path) -> None:
    shards = prepared(tmp_path, columns())
    verify(shards, lambda done: None)
    assert shards.schema.loss_weights == WEIGHTS
    assert shards.rows.label_R.shape == (ROWS, 4)
    loader = Loader(
        shards, batch_size=7, seed=5, shuffle=True, shuffle_block_rows=50, shuffle_read_rows=10
    )
    batches, state = list(sequential_batches(shards, range(ROWS), 41)), START
    for _ in range(2 * loader.steps_per_epoch):
        batch, state = loader.read(state)
        batches.append(batch)
    for batch in batches:
        number_B = batch.dense_BI[:, 0].astype(int)
        np.testing.assert_array_equal(batch.label_B, expected()[number_B])
        assert batch.part(slice(1, 3)).label_B.tolist() == batch.label_B[1:3].tolist()
    train = shards.train_rows
    clicks = shards.manifest.parts.train.clicks
    assert clicks == shards.rows.label_R[train.start : train.stop, 0].sum()


def test_labels_that_are_the_same_in_all_rows_are_told(tmp_path: Path) -> None:
    assert [*label_remarks(prepared(tmp_path, columns()))] == []
    alike = {**columns(), "clicked": [0] * ROWS, "action": ["buy"] * ROWS}
    (tmp_path / "alike").mkdir()
    shards = prepared(tmp_path / "alike", alike)
    rows = f"in all {len(shards.train_rows)} training rows: it cannot be learned"
    wanted = [f"label 'clicked' is 0 {rows}", f"label 'action' is 1 {rows}"]
    assert [*label_remarks(shards)] == wanted


def test_csv_has_the_same_labels_and_all_else_is_as_with_one(tmp_path: Path) -> None:
    prepared(tmp_path, columns())
    pa_csv.write_csv(pa.table(columns()), tmp_path / "rows.csv")
    run_prepare([tmp_path / "rows.csv"], tmp_path / "csv", schema())
    one = schema("label: clicked\nignore: [stars, action]\n")
    run_prepare([tmp_path / "rows.csv"], tmp_path / "one", one)
    for name in ("label", "dense", "ids"):
        wanted = (tmp_path / "out" / f"{name}.npy").read_bytes()
        assert (tmp_path / "csv" / f"{name}.npy").read_bytes() == wanted
        if name != "label":
            assert (tmp_path / "one" / f"{name}.npy").read_bytes() == wanted
    alone = np.load(tmp_path / "one" / "label.npy")
    np.testing.assert_array_equal(alone, np.load(tmp_path / "out" / "label.npy")[:, 0])
    assert one.beside_repr == [] and one.loss_weights == {}


def test_what_labels_are_called_and_weigh_is_part_of_the_rows(tmp_path: Path) -> None:
    found = prepared(tmp_path, columns()).manifest
    others = {
        "weight": LABELS.replace("0.5", "0.7"),
        "name": LABELS.replace("liked", "loved"),
        "order": LABELS.replace("  - clicked\n", "") + "  - clicked\n",
    }
    for what, labels in others.items():
        changed = replace(found, semantics=replace(found.semantics, schema=schema(labels)))
        assert changed.identity != found.identity, what
        assert changed.schema.beside_repr != found.schema.beside_repr, what
        assert (changed.meaning != found.meaning) == (what != "weight"), what
    assert found.meaning["labels"] == [*WEIGHTS]


def test_rows_of_other_labels_cannot_go_on(tmp_path: Path) -> None:
    base = prepared(tmp_path, columns()).preprocessing
    for labels, named in (
        ("label: clicked\nignore: [stars, action]\n", "clicked"),
        (LABELS.replace("liked", "loved"), "clicked, loved, action, stars"),
    ):
        told = rf"label: prepared with clicked, liked, action, stars, the schema says {named}"
        with pytest.raises(DataError, match=told):
            run_prepare([tmp_path / "rows.parquet"], tmp_path / "on", schema(labels), base=base)
    # What makes them, and how much they weigh, may change.
    more = schema(LABELS.replace("0.5", "0.7").replace("above: 3", "above: 2"))
    made = run_prepare([tmp_path / "rows.parquet"], tmp_path / "on", more, base=base)
    assert made.begins_with(base.manifest.meaning)


@pytest.mark.parametrize(
    ("column", "value", "reason"),
    [
        ("clicked", 2, "2 is neither 0 nor 1"),
        ("clicked", None, "is empty"),
        ("stars", None, "is empty"),
        ("stars", "many", "'many' is not a number"),
        ("action", None, "is empty"),
        ("action", "", "is empty"),
    ],
)
def test_a_row_with_a_label_that_is_none_is_bad(
    column: str, value: Any, reason: str, tmp_path: Path
) -> None:
    rows = columns()
    rows[column][6] = value
    if column == "stars" and isinstance(value, str):
        rows[column] = [str(one) for one in rows[column]]
    with pytest.raises(DataError, match=rf"rows.parquet: row 7: column '{column}': {reason}"):
        prepared(tmp_path, rows)
    shards = prepared(tmp_path, rows, on_bad_row="skip")
    assert (shards.manifest.rows, shards.manifest.bad_rows) == (ROWS - 1, 1)
    number_R = shards.rows.dense_RI[:, 0].astype(int)
    np.testing.assert_array_equal(shards.rows.label_R, expected()[number_R])


def test_a_damaged_label_is_found_where_it_is_read(tmp_path: Path) -> None:
    shards = prepared(tmp_path, columns())
    stored = np.load(tmp_path / "out" / "label.npy", mmap_mode="r+")
    stored[3, 2] = 7
    stored.flush()
    with pytest.raises(DataError, match=r"label.npy: row 3 .*: label 'action': 7 is neither 0 nor"):
        list(sequential_batches(shards, range(ROWS), 41))
    with pytest.raises(DataError, match=r"label.npy: rows 0 to 299 .*: checksum differs"):
        verify(shards, lambda done: None)


def test_values_that_make_no_label_are_named(tmp_path: Path) -> None:
    pq.write_table(pa.table(columns()), tmp_path / "rows.parquet")
    labels = """
label:
  - {column: action, positive: [buy, clik]}
  - {column: action, positive: [view, clik, saw], name: seen}
ignore: [clicked, stars]
"""
    told: list[str] = []
    run_prepare([tmp_path / "rows.parquet"], tmp_path / "out", schema(labels), say=told.append)
    assert [one.strip() for one in told if "no row" in one] == [
        "no row has action = 'clik' (positive, data.schema)",
        "no row has action = 'clik' or 'saw' (positive, data.schema)",
    ]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ("[clicked]", "label: a list has two labels or more; one is written without brackets"),
        ("[]", "label: a list has two labels or more"),
        ("[clicked, clicked]", r"label\[1\].name = 'clicked': is that of label\[0\] too"),
        (
            "[{column: stars, above: 3}, {column: stars, above: 4}]",
            r"label\[1\].name = 'stars': is that of label\[0\] too",
        ),
        ("[clicked, shop]", r"categorical\[0\].name = 'shop': is label too"),
        (
            "[clicked, {column: stars, above: 3, positive: [3]}]",
            r"label\[1\]: 'stars' needs either `positive` or `above`, or neither",
        ),
        ("[clicked, 3]", r"label\[1\] = 3: must be "),
        ("[clicked, [stars]]", r"label\[1\] = \['stars'\]: must be "),
        ("[clicked, {column: stars, upon: 3}]", r"label\[1\].upon: unknown key$"),
        ("[clicked, {above: 3}]", r"label\[1\].column: missing$"),
        ("[clicked, {column: stars, loss_weight: 0}]", r"label\[1\].loss_weight = 0: must be gr"),
        ("[clicked, {column: stars, loss_weight: .inf}]", r"label\[1\].loss_weight = .*finite"),
        ("[clicked, {column: stars, loss_weight: much}]", r"label\[1\].loss_weight = 'much': must"),
        ("{column: stars, above: 3, loss_weight: 2}", "label.loss_weight = 2.0: only of one in a"),
        ("{column: stars, above: 3, name: liked}", "label.name = 'liked': only of one in a list"),
    ],
)
def test_faults_of_the_schema_name_its_keys(labels: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"mine.yaml: {message}"):
        schema(f"label: {labels}\n")
    with pytest.raises(ConfigError, match="label: not with format: criteo"):
        schema("label: [clicked, bought]\nformat: criteo\n")
