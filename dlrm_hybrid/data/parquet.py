"""Prepared rows as Parquet, one file per day, for notebooks."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from dlrm_hybrid.data.format import FIRST_DENSE_WORD, FIRST_ID_WORD, NUM_CATEGORICAL, NUM_DENSE
from dlrm_hybrid.data.shards import Shards, Words
from dlrm_hybrid.types import ResourceError

# In the order of a record's words. A dense column holds log(x + 1), not x: its name says so.
COLUMNS = (
    "label",
    *(f"I{i}_log1p" for i in range(1, NUM_DENSE + 1)),
    *(f"C{i}" for i in range(1, NUM_CATEGORICAL + 1)),
)
ROW_GROUP_ROWS = 1 << 18


def export_parquet(
    shards: Shards, folder: Path, progress: Callable[[int], None]
) -> tuple[Path, ...]:
    """Write `day_0.parquet`, … with the columns label (int8), I1_log1p … (float32), C1 … (int32).

    C1 … C26 are row numbers of the embedding tables. Files of the same names are replaced, each
    only once the new one is whole; memory holds one row group, whatever the number of rows.

    Args:
        shards: what to write.
        folder: made if it is not there.
        progress: called with the rows written so far, after every row group.

    Returns:
        The files, in the order of the days.

    Raises:
        ResourceError: pyarrow is not installed, or the folder cannot be written.
    """
    pyarrow = _pyarrow()
    paths = tuple(folder / f"day_{day}.parquet" for day in range(len(shards.days_RW)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, records_RW, before in zip(paths, shards.days_RW, shards.borders, strict=False):
            _write_day(pyarrow, path, records_RW, before, progress)
    except OSError as error:
        raise ResourceError(f"{folder}: cannot write Parquet: {error}") from error
    return paths


def _pyarrow() -> ModuleType:
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError:
        raise ResourceError(
            "Parquet needs pyarrow, which is not installed: pip install 'dlrm-hybrid[parquet]'"
        ) from None


def _write_day(
    pyarrow: ModuleType, path: Path, records_RW: Words, before: int, progress: Callable[[int], None]
) -> None:
    partial = path.with_suffix(".parquet.partial")
    schema = _table(pyarrow, records_RW[:0]).schema
    try:
        with pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as file:
            for start in range(0, len(records_RW), ROW_GROUP_ROWS):
                group_RW = records_RW[start : start + ROW_GROUP_ROWS]
                file.write_table(_table(pyarrow, group_RW), row_group_size=ROW_GROUP_ROWS)
                progress(before + start + len(group_RW))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _table(pyarrow: ModuleType, records_RW: Words) -> Any:
    floats_RW, integers_RW = records_RW.view(np.float32), records_RW.view(np.int32)
    stored = [
        floats_RW[:, 0].astype(np.int8),
        *(floats_RW[:, word].copy() for word in range(FIRST_DENSE_WORD, FIRST_ID_WORD)),
        *(integers_RW[:, FIRST_ID_WORD + f].copy() for f in range(NUM_CATEGORICAL)),
    ]
    columns: list[Any] = [pyarrow.array(array) for array in stored]
    return pyarrow.table(columns, names=COLUMNS)
