"""A stranger's table: rows as Python values, as files of each format, and their plain reading."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import criteo_rows
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_hybrid.data.manifest import Manifest, Semantics
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.schemas import reading as schemas

COLUMNS = """
label: bought
dense:
  - {name: age, transform: standardise, missing: 40}
  - {name: price, transform: log1p}
  - {name: score}
categorical:
  - {name: città, min_count: 3}
  - {name: shop, kind: integer}
  - {name: device}
  - {name: code, kind: hash8}
  - {name: page, hash_size: 50}
ignore: [user, tags]
"""
TAGS = '  - {name: tags, max_length: 6, separator: "|"}\n'
BY_TIME = 'split: {by: time, column: when, validation_from: 2024-02-01, test_from: "2024-03-01"}\n'
BY_FRACTION = "split: {by: fraction, validation: 0.2, test: 0.2, seed: 3}\n"

Row = dict[str, Any]


def table(split: str = BY_TIME, tags: bool = True) -> Schema:
    text = COLUMNS + split
    if tags:
        text = text.replace("ignore: [user, tags]\n", TAGS + "ignore: [user]\n")
    elif split != BY_TIME:
        text = text.replace("tags]", "tags, when]")
    if tags and split != BY_TIME:
        text = text.replace("[user]", "[user, when]")
    return schemas.loads(text, "table.yaml")


def make_rows(rows: int, seed: int = 0) -> list[Row]:
    """Rows with repeated, rare and missing values, commas, quotes, newlines and any script."""
    rng = np.random.default_rng(seed)
    cities = ["Roma", "São Paulo", "北京", 'a "b", c', "Z\nürich", "Łódź", "Ο"]
    cities += [f"town {i}" for i in range(40)]
    made = []
    start = np.datetime64("2024-01-01", "s")
    for number in range(rows):
        when = start + np.timedelta64(number * 90 * 86400 // rows, "s")
        drawn = {
            "user": f"u{number}",
            "bought": int(rng.integers(2)),
            "when": str(when).replace("T", " "),
            "age": None if rng.random() < 0.2 else float(rng.integers(18, 90)),
            "price": None if rng.random() < 0.1 else round(float(rng.normal(50, 40)), 2),
            "score": round(float(rng.random()), 3),
            "città": None if rng.random() < 0.1 else cities[int(rng.zipf(1.4)) % len(cities)],
            "shop": None if rng.random() < 0.1 else int(rng.integers(-5, 30)) * 10**12,
            "device": ["phone", "tablet", None][int(rng.integers(3))],
            "code": None if rng.random() < 0.1 else f"{int(rng.integers(60)) * 71582788:08x}",
            "page": f"/p/{int(rng.zipf(1.3)) % 500}",
            "tags": [f"t{int(one)}" for one in rng.integers(0, 12, int(rng.integers(0, 7)))],
        }
        made.append(drawn)
    return made


def write_csv(path: Path, rows: list[Row]) -> Path:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        for row in rows:
            writer.writerow({**row, "tags": "|".join(row["tags"])})
    return path


def write_parquet(path: Path, rows: list[Row]) -> Path:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    arrays = {name: pa.array(values) for name, values in columns.items()}
    arrays["when"] = pa.array([np.datetime64(one, "us") for one in columns["when"]])
    arrays["device"] = arrays["device"].dictionary_encode()
    pq.write_table(pa.table(arrays), path, row_group_size=97)
    return path


def write_npy(path: Path, rows: list[Row]) -> Path:
    """Without missing numbers and without lists, which a structured array cannot hold."""
    kinds = {
        **{"user": "U8", "bought": "i1", "when": "M8[s]", "age": "f4", "price": "f8"},
        **{"score": "f8", "città": "U20", "shop": "i8", "device": "S8", "code": "U8", "page": "U8"},
    }
    array = np.zeros(len(rows), list(kinds.items()))
    for name in kinds:
        empty = np.nan if name in ("age", "price") else -(2**63) if name == "shop" else ""
        array[name] = [empty if row[name] is None else row[name] for row in rows]
    np.save(path, array)
    return path


NOT_CRITEO = dict.fromkeys(("days", "day_split", "vocabulary", "min_count", "max_ind_range"))


def semantics(schema: Schema, on_bad_row: str = "error") -> Semantics:
    return criteo_rows.semantics(schema=schema, on_bad_row=on_bad_row, **NOT_CRITEO)


def run_prepare(raw: list[Path], output: Path, schema: Schema, **options: Any) -> Manifest:
    defaults = {"schema": schema, "max_bad_rows": 1000, "block_bytes": 1 << 16}
    return criteo_rows.run_prepare(raw, output, **NOT_CRITEO | defaults | options).manifest


def part_of(row: Row) -> int:
    return 0 if row["when"] < "2024-02-01" else 1 if row["when"] < "2024-03-01" else 2


def plain_dense(rows: list[Row], parts: list[int]) -> np.ndarray:
    ages = [40.0 if row["age"] is None else row["age"] for row in rows]
    known = [age for age, part in zip(ages, parts, strict=True) if part == 0]
    mean = sum(known) / len(known)
    deviation = math.sqrt(sum((age - mean) ** 2 for age in known) / len(known))
    return np.array(
        [
            ((age - mean) / deviation, math.log1p(max(row["price"] or 0.0, 0.0)), row["score"])
            for age, row in zip(ages, rows, strict=True)
        ]
    )


def plain_ids(
    values: list[Any], parts: list[int], min_count: int = 1
) -> tuple[list[Any], dict[Any, int]]:
    """Categories of the training rows by first appearance in all rows, from id 1."""
    known = [value for value, part in zip(values, parts, strict=True) if part == 0]
    kept = [one for one in dict.fromkeys(values) if known.count(one) >= min_count]
    ids = {one: number for number, one in enumerate(kept, 1)}
    return kept, ids
