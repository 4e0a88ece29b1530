"""Columns with one table have one vocabulary: their ids appear, and are counted, together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from table_rows import plain_ids, run_prepare

from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.manifest import Growth
from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading as schemas
from dlrm_hybrid.data.shards import open_shards, verify
from dlrm_hybrid.types import DataError

SCHEMA = """
label: bought
dense: []
categorical:
  - {name: viewed, table: item, min_count: 2}
  - {name: shop}
  - {name: history, table: item, min_count: 2, max_length: 5, separator: "|"}
  - {name: bought_last, table: item, min_count: 2}
split: {by: time, column: day, test_from: 3}
"""
FILES = ["1.npy", "1.offsets.npy", "2.npy", "2.offsets.npy"]


def schema(text: str = SCHEMA) -> Schema:
    return schemas.loads(text, "m.yaml")


def rows_of(seed: int, items: range) -> list[dict]:
    rng = np.random.default_rng(seed)
    drawn = [f"i{one}" for one in items]
    return [
        {
            "bought": int(rng.integers(2)),
            "viewed": str(rng.choice(drawn)),
            "shop": f"s{rng.integers(9)}",
            "history": "|".join(rng.choice(drawn, rng.integers(0, 6))),
            "bought_last": "" if rng.random() < 0.2 else str(rng.choice(drawn)),
            "day": 1 + number * 3 // 600,
        }
        for number in range(600)
    ]


def write(path: Path, rows: list[dict]) -> Path:
    lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
    path.write_text("\n".join(lines) + "\n")
    return path


def items_of(row: dict) -> list[str]:
    """In the order of the schema's columns."""
    history = row["history"].split("|") if row["history"] else []
    return [row["viewed"], *history, row["bought_last"]]


def prepared(path: Path, rows: list[dict], text: str = SCHEMA, **more) -> Preprocessing:
    output = path.with_suffix("")
    return Preprocessing(output, run_prepare([write(path, rows)], output, schema(text), **more))


def test_ids_appear_and_are_counted_over_the_columns_of_a_row(tmp_path: Path) -> None:
    rows = rows_of(0, range(300))
    found = prepared(tmp_path / "rows.csv", rows)
    flat = [(item, int(row["day"] > 2)) for row in rows for item in items_of(row)]
    kept, ids = plain_ids(*map(list, zip(*flat, strict=True)), min_count=2)
    alone, _ = plain_ids([row["viewed"] for row in rows], [int(row["day"] > 2) for row in rows], 2)
    viewed, shop, history, last = found.vocabularies()
    assert [*viewed.keys] == kept and len(alone) < len(kept) < len({item for item, _ in flat})
    assert viewed.keys is history.keys is last.keys
    assert [one.column.name for one in (viewed, history)] == ["viewed", "history"]
    assert found.manifest.table_rows == (len(kept) + 1, len(shop.keys) + 1, *[len(kept) + 1] * 2)
    assert found.table_rows == found.manifest.table_rows[:2]
    assert sorted(one.name for one in (found.folder / "vocabulary").iterdir()) == FILES
    shards = open_shards(found.folder, None)
    verify(shards, lambda done: None)
    (batch,) = sequential_batches(shards, range(600), 600)
    in_order = [row for part in (0, 1) for row in rows if (row["day"] > 2) == part]
    expected = [[ids.get(row["viewed"], 0) for row in in_order]]
    expected.append([ids.get(one, 0) for row in in_order for one in items_of(row)[1:-1]])
    expected.append([ids.get(row["bought_last"], 0) for row in in_order])
    offsets = batch.bags.offsets[::600].tolist()
    for column, wanted in zip((0, 2, 3), expected, strict=True):
        got = batch.bags.values[offsets[column] : offsets[column + 1]].tolist()
        assert got == wanted and max(got) > 0 == min(got)


def test_the_size_of_blocks_changes_nothing(tmp_path: Path) -> None:
    rows = rows_of(1, range(300))
    one, other = (
        prepared(tmp_path / f"{size}.csv", rows, block_bytes=size) for size in (1 << 11, 1 << 20)
    )
    for name in ("ids.npy", "ids.3.values.npy", "vocabulary/1.npy"):
        first, second = ((where.folder / name).read_bytes() for where in (one, other))
        assert first == second and len(first) > 1000


def test_a_next_day_appends_to_the_table_once(tmp_path: Path) -> None:
    base = prepared(tmp_path / "first.csv", rows_of(2, range(100)))
    after = prepared(tmp_path / "next.csv", rows_of(3, range(50, 150)), base=base)
    before, now = (one.vocabularies()[2].keys for one in (base, after))
    assert [*now[: len(before)]] == [*before]
    assert {*now[len(before) :]} <= {f"i{one}" for one in range(100, 150)}
    viewed, _, history, last = after.manifest.base.growth
    assert viewed == history == last
    assert viewed.appended == len(now) - len(before) > 20
    apart = SCHEMA.replace("history, table: item,", "history,")
    with pytest.raises(DataError, match=r"categorical\[2\].table: prepared with 'item', the sch"):
        prepared(tmp_path / "apart.csv", rows_of(3, range(9)), apart, base=base)


def test_a_full_table_gives_rows_to_what_any_column_has(tmp_path: Path) -> None:
    text = SCHEMA.replace("min_count: 2", "max_rows: 101, evict: least_recent")
    assert text != SCHEMA
    base = prepared(tmp_path / "first.csv", rows_of(4, range(99)), text)
    after = prepared(tmp_path / "next.csv", rows_of(5, range(30, 129)), text, base=base)
    assert after.manifest.base.growth[0] == Growth(reused=70, appended=0, unknown=0, evicted=30)
    replaced = after.replaced(base)
    assert len(replaced[0]) == 30 and np.array_equal(replaced[0], replaced[2])
    gone = {base.vocabularies()[0].keys[one - 1] for one in replaced[0].tolist()}
    assert gone == {f"i{one}" for one in range(30)}


def test_a_table_of_one_column_is_that_columns_own() -> None:
    names = ("history, table: item", "history"), ("last, table: item", "last")
    one = schema(SCHEMA.replace(*names[0]).replace(*names[1]))
    assert one.table_of_column == ()
    assert (schema().table_of_column, schema().table_names) == ((0, 1, 0, 0), ("item", "shop"))
    assert schema().beside_repr != one.beside_repr
