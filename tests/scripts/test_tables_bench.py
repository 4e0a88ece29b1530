"""The benchmark of tables prepares what it writes, in every format the same."""

from pathlib import Path

import numpy as np
import tables


def test_both_formats_are_prepared_alike(tmp_path: Path) -> None:
    found = tables.table_rows(3000, 1, tmp_path)
    assert [row["format"] for row in found] == ["parquet", "csv"]
    for name in ("label", "ids", "ids.6.values"):
        one, other = (
            np.load(tmp_path / f".{kind}1" / f"{name}.npy") for kind in ("parquet", "csv")
        )
        np.testing.assert_array_equal(one, other)
