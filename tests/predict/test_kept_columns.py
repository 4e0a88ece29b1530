"""Columns that `predict.keep` passes on are in the file of scores, whatever their type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dlrm_hybrid.data.schemas import reading
from dlrm_hybrid.data.sources.arrow import pa, parquet
from dlrm_hybrid.predict.scoring import score_file
from dlrm_hybrid.predict.sources import read_blocks

SCHEMA = reading.loads(
    "label: y\ndense: []\ncategorical: [{name: c}]\nignore: [kept]\n"
    "split: {by: fraction, test: 0.5}",
    "s.yaml",
)
WORDS = ["a", "b", None]


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (pa.array(WORDS, pa.string_view()), ["a", "b", ""]),
        (pa.array(WORDS).dictionary_encode(), ["a", "b", ""]),
        (pa.array([["a"], ["b"], None], pa.list_(pa.string_view())), ["['a']", "['b']", ""]),
        (pa.array([1, 2, None], pa.time64("ns")), ["00:00:00.000000001", "00:00:00.000000002", ""]),
        (pa.array([b"\xff", b"b", None], pa.binary(1)), ["b'\\xff'", "b'b'", ""]),
        (pa.array([2**62, 0, None], pa.uint64()), [str(2**62), "0", ""]),
        (pa.array([{"a": 1}, {"a": 2}, None]), ["{'a': 1}", "{'a': 2}", ""]),
    ],
)
def test_kept_columns_of_any_type(tmp_path: Path, array: Any, text: list[str]) -> None:
    rows = {"y": [0, 1, 0], "c": ["a", "b", "c"], "kept": array}
    parquet.write_table(pa.table(rows), tmp_path / "rows.parquet")
    for output in ("scores.csv", "scores.parquet"):
        with score_file(tmp_path / output) as file:
            schema = replace(SCHEMA, split=None)
            raw = [tmp_path / "rows.parquet"]
            for block in read_blocks(raw, schema, ["kept"], 1 << 16, lambda count: None):
                file.write({"kept": block.kept["kept"]})
    lines = (tmp_path / "scores.csv").read_text().splitlines()[1:]
    assert [one.strip('"') for one in lines] == text
    assert parquet.read_table(tmp_path / "scores.parquet").num_rows == 3
