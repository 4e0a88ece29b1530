"""Measures `prepare` on a table: 3 dense, 5 categorical and 1 multi-hot column, and a time.

    python scripts/costs/tables.py --rows 500000 --repeats 3

Rows are random, a tenth of each column missing. Goal: 300,000 rows per CPU-second.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from dlrm_hybrid.data.folder import PrepareOptions
from dlrm_hybrid.data.manifest import Semantics
from dlrm_hybrid.data.prepare import prepare
from dlrm_hybrid.data.schemas.reading import loads
from dlrm_hybrid.data.sources.arrow import pa, pa_csv, parquet

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from harness import Page, Row, arguments, publish, silent, spread

SCHEMA = """
label: label
dense: [{name: d0, transform: log1p}, {name: d1, transform: standardise}, {name: d2}]
categorical:
  - {name: c0}
  - {name: c1, min_count: 2}
  - {name: c2}
  - {name: c3}
  - {name: c4}
  - {name: tags, max_length: 8, separator: "|"}
split: {by: time, column: when, validation_from: 2024-01-18, test_from: 2024-01-21}
"""
CARDINALITIES = (10, 300, 1000, 20_000, 200_000)
TAGS = 500
MISSING = 0.1
DAYS = 24


def main() -> None:
    """Measure, print the page."""
    parser = arguments(__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    options = parser.parse_args()

    def measure() -> Page:
        with TemporaryDirectory(prefix="bench-", dir=".") as folder:
            return {"Preparing a table": table_rows(options.rows, options.repeats, Path(folder))}

    publish(measure, options.output, compiles=True)


def table_rows(rows: int, repeats: int, folder: Path) -> list[Row]:
    """Rows per CPU-second of each format; spreads are median (lowest – highest)."""
    found: list[Row] = []
    for path in write_files(rows, folder):
        speeds: list[float] = []
        for repeat in range(repeats + 1):  # the first one imports
            before = time.process_time()
            prepare([path], folder / f"{path.suffix}{repeat}", options(), silent, silent)
            speeds.append(rows / (time.process_time() - before) / 1000)
        found.append(
            {
                "format": path.suffix[1:],
                "rows": rows,
                "MB": path.stat().st_size / 1e6,
                "1000 rows per CPU-second": spread(speeds[1:], 0),
            }
        )
    return found


def options() -> PrepareOptions:
    """As the configuration has them."""
    semantics = Semantics(
        days=None,
        day_split=None,
        vocabulary=None,
        min_count=None,
        max_ind_range=None,
        on_bad_row="error",
        schema=loads(SCHEMA, "schema"),
    )
    return PrepareOptions(
        semantics=semantics,
        max_bad_rows=0,
        processes=1,
        block_bytes=1 << 23,
        overwrite=False,
        advice="",
    )


def write_files(rows: int, folder: Path) -> list[Path]:
    """The same random rows as Parquet and as CSV."""
    rng = np.random.default_rng(0)
    columns: dict[str, Any] = {"label": pa.array(rng.integers(0, 2, rows))}
    for number, values in enumerate(
        (rng.pareto(1.0, rows), rng.normal(5, 3, rows), rng.random(rows))
    ):
        columns[f"d{number}"] = pa.array(values.round(4), mask=rng.random(rows) < MISSING)
    for number, count in enumerate(CARDINALITIES):
        names = pa.array([f"category {number}-é-{one}" for one in range(count)])
        ranks = pa.array(rng.zipf(1.2, rows) % count, mask=rng.random(rows) < MISSING)
        columns[f"c{number}"] = names.take(ranks)
    lengths = rng.integers(0, 6, rows)
    tags = pa.array([f"tag{one}" for one in range(TAGS)]).take(
        pa.array(rng.integers(0, TAGS, lengths.sum()))
    )
    borders = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns["tags"] = pa.ListArray.from_arrays(pa.array(borders), tags)
    seconds = np.arange(rows) * (DAYS * 86_400 // max(rows, 1) or 1) % (DAYS * 86_400)
    columns["when"] = pa.array(np.datetime64("2024-01-01", "s") + seconds)
    table = pa.table(columns)
    parquet.write_table(table, folder / "rows.parquet")
    joined = pa.array(["|".join(one) for one in columns["tags"].to_pylist()])
    index = table.schema.get_field_index("tags")
    pa_csv.write_csv(table.set_column(index, "tags", joined), folder / "rows.csv")
    return [folder / "rows.parquet", folder / "rows.csv"]


if __name__ == "__main__":
    main()
