"""Rows that have all that a schema can ask of them, as Python values, as files, and checked."""

from __future__ import annotations

import csv
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from table_rows import run_prepare, semantics

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.shards import Shards, open_shards

ROWS, MOST = 300, 3
LABELS = """
label:
  - clicked
  - {column: stars, above: 3, name: liked, loss_weight: 0.5}
  - {column: action, positive: [buy, order], loss_weight: 2}
  - {column: stars, above: 4}
"""
SCHEMA = f"""{LABELS}
weight: weight
group: user
dense: [{{name: number}}, {{name: image, length: 2, missing: 0.5, separator: "|"}}]
categorical:
  - {{name: shop, kind: integer}}
  - {{name: tags, kind: integer, max_length: 3, truncate: last, separator: "|", weights: much}}
split: {{by: fraction, validation: 0.2, test: 0.2, seed: 3}}
"""
LISTS = ("image", "tags", "much")

Columns = dict[str, list[Any]]


def schema_of(text: str = SCHEMA) -> Schema:
    return reading.loads(text, "mine.yaml")


def columns() -> Columns:
    """Each row has its number, so that it is found again after a split and a shuffle."""
    draw = np.random.default_rng(0)
    tags = [draw.integers(0, 200, size).tolist() for size in draw.integers(0, 6, ROWS)]
    weight_R = draw.exponential(size=ROWS).astype(np.float32)
    weight_R[::7] = 0
    return {
        "clicked": draw.integers(0, 2, ROWS).tolist(),
        "stars": draw.integers(1, 6, ROWS).tolist(),
        "action": draw.choice(["view", "buy", "order", "Buy"], ROWS).tolist(),
        "weight": weight_R.tolist(),
        "user": [f"u{row % 40}" for row in range(ROWS)],
        "number": list(range(ROWS)),
        "image": draw.random((ROWS, 2)).tolist(),
        "shop": draw.integers(0, 9, ROWS).tolist(),
        # The text of a list of one missing value is that of an empty list.
        "tags": [[None if i % 9 == 0 and len(ids) > 1 else i for i in ids] for ids in tags],
        "much": [draw.normal(size=len(ids)).astype(np.float32).tolist() for ids in tags],
    }


def write_parquet(path: Path, rows: Mapping[str, Any]) -> Path:
    pq.write_table(pa.table(dict(rows)), path)
    return path


def bars(values: list[Any]) -> str:
    return "|".join("" if value is None else str(value) for value in values)


def write_csv(path: Path, rows: Columns, write: Callable[[list[Any]], str] = bars) -> Path:
    texts = {name: [write(one) for one in rows[name]] for name in LISTS if name in rows}
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([list(rows), *zip(*(rows | texts).values(), strict=True)])
    return path


def prepared(folder: Path, rows: Mapping[str, Any], text: str = SCHEMA, **options: Any) -> Shards:
    folder.mkdir(exist_ok=True)
    path = write_parquet(folder / "rows.parquet", rows)
    run_prepare([path], folder / "out", schema_of(text), **options)
    wanted = semantics(schema_of(text), options.get("on_bad_row", "error"))
    return open_shards(folder / "out", wanted)


def expected_labels(rows: Columns) -> np.ndarray:
    stars_R = np.array(rows["stars"])
    bought_R = np.isin(rows["action"], ["buy", "order"])
    return np.array([rows["clicked"], stars_R > 3, bought_R, stars_R > 4], np.float32).T


def kept_ids(tags: list[Any], much: list[Any]) -> list[tuple[Any, Any]]:
    """The last ids of a list and their weights, without missing ones."""
    pairs = list(zip(tags, much, strict=True))[-MOST:]
    return [(tag, weight) for tag, weight in pairs if tag is not None]


def lists_of(bags: Bags[np.ndarray], table: int) -> list[slice]:
    """Where the ids of each row are."""
    offsets = bags.offsets
    assert offsets is not None
    ends = offsets[table * bags.rows : (table + 1) * bags.rows + 1].tolist()
    return [slice(start, stop) for start, stop in zip(ends, ends[1:], strict=False)]


def assert_rows(batch: Batch, shards: Shards, rows: Columns) -> int:
    """Each row has all that is its own; how many of its ids are of unknown categories."""
    numbers, unknown = batch.dense_BI[:, 0].astype(int).tolist(), 0
    np.testing.assert_array_equal(batch.label_B, expected_labels(rows)[numbers])
    np.testing.assert_array_equal(batch.weight_B, np.float32(rows["weight"])[numbers])
    np.testing.assert_array_equal(batch.dense_BI[:, 1:], np.float32(rows["image"])[numbers])
    shops, tags = (one.keys for one in shards.preprocessing.vocabularies())
    bags = batch.bags
    assert bags.weights.dtype == np.float32 and (bags.weights[: bags.rows] == 1).all()  # of shops
    for number, shop, place in zip(
        numbers, bags.values[: bags.rows], lists_of(bags, 1), strict=True
    ):
        assert shop == 0 or shops[shop - 1] == rows["shop"][number]
        wanted = kept_ids(rows["tags"][number], rows["much"][number])
        assert bags.weights[place].tolist() == [weight for _, weight in wanted]
        for id_, (tag, _) in zip(bags.values[place].tolist(), wanted, strict=True):
            assert id_ == 0 or tags[id_ - 1] == tag
            unknown += id_ == 0
    return unknown
