"""Count raw Criteo rows and make the aggregate profile that synthetic rows are drawn from.

Only counts leave this module: no row, no category value. Memory grows with the distinct categories
(12 bytes each), not with the rows.

Shapes: R rows of a chunk, C = 39 columns, K distinct keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pandas as pd

from dlrm_hybrid.data import curves
from dlrm_hybrid.data.format import NUM_CATEGORICAL, NUM_COLUMNS, NUM_DENSE
from dlrm_hybrid.data.profile import WEIGHT_ONE, Staircase
from dlrm_hybrid.types import DataError

CHUNK_ROWS = 500_000
_DIGIT = np.full(256, -1, np.int64)
_DIGIT[list(b"0123456789abcdef")] = np.arange(16)
Integers = npt.NDArray[np.int64]


@dataclass(slots=True)
class Counts:
    """What was seen so far.

    Attributes:
        rows: rows read.
        clicks: rows with label 1.
        missing_CC: rows in which both columns are empty; the diagonal counts one column.
        keys: distinct values per column, sorted: integers, or categories read as hexadecimal.
        counts: rows of each of them.
    """

    rows: int
    clicks: int
    missing_CC: Integers
    keys: list[Integers]
    counts: list[Integers]


def count(paths: Sequence[Path], progress: Callable[[int], None]) -> Counts:
    """Count all rows of the raw files; `progress` is called with the rows read so far.

    Raises:
        DataError: a file cannot be read as 40 tab-separated columns; names it.
    """
    width = NUM_COLUMNS - 1
    none = np.zeros(0, np.int64)
    seen = Counts(0, 0, np.zeros((width, width), np.int64), [none] * width, [none] * width)
    for path in paths:
        try:
            for columns in _chunks(path):
                _add(seen, columns)
                progress(seen.rows)
        except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
            raise DataError(f"{path}: cannot be measured: {error}") from error
    if seen.rows == 0:
        raise DataError(f"{', '.join(str(path) for path in paths)}: no rows to measure")
    return seen


def integer_columns(seen: Counts) -> tuple[Staircase, ...]:
    """Staircases of I1 … I13."""
    return tuple(
        _staircase(seen, column, curves.integer_steps(seen.keys[column], seen.counts[column]))
        for column in range(NUM_DENSE)
    )


def categorical_columns(seen: Counts, cardinalities: Sequence[int]) -> tuple[Staircase, ...]:
    """Staircases of C1 … C26 over as many ranks as `cardinalities` says, missing included.

    Raises:
        DataError: more categories were seen than published; names the column.
    """
    stairs: list[Staircase] = []
    for categorical, cardinality in enumerate(cardinalities):
        column = NUM_DENSE + categorical
        support = cardinality - int(seen.missing_CC[column, column] > 0)
        try:
            steps = curves.rank_steps(seen.counts[column], support)
        except ValueError as error:
            raise DataError(f"--cardinalities: C{categorical + 1}: {error}") from error
        stairs.append(_staircase(seen, column, steps))
    return tuple(stairs)


def seen_cardinalities(seen: Counts) -> tuple[int, ...]:
    """Categories seen per column, a missing one included."""
    return tuple(
        len(seen.keys[column]) + int(seen.missing_CC[column, column] > 0)
        for column in range(NUM_DENSE, NUM_DENSE + NUM_CATEGORICAL)
    )


def _staircase(seen: Counts, column: int, steps: curves.Steps) -> Staircase:
    both, alone = seen.missing_CC[column], seen.missing_CC.diagonal()
    # columns that are empty in the same rows, but for one in a thousand, share their draw
    partners = np.flatnonzero(both * 1000 >= np.maximum(alone, alone[column]) * 999)
    return Staircase(
        missing=round(int(alone[column]) * WEIGHT_ONE / seen.rows),
        missing_with=int(partners[0]) if alone[column] else column,
        starts=steps.starts,
        stop=steps.stop,
        weights=steps.weights,
    )


def _chunks(path: Path) -> Iterator[list[Any]]:
    """Chunks as 40 pandas columns each."""
    types: dict[int, str] = {0: "int8"}
    types |= dict.fromkeys(range(1, 1 + NUM_DENSE), "float64")
    types |= dict.fromkeys(range(1 + NUM_DENSE, NUM_COLUMNS), "str")
    reader: Any = cast(Any, pd).read_csv(
        path,
        sep="\t",
        header=None,
        names=list(types),
        index_col=False,
        dtype=types,
        keep_default_na=False,
        na_values=[""],
        chunksize=CHUNK_ROWS,
    )
    with reader:
        for chunk in reader:
            yield [chunk[column] for column in range(NUM_COLUMNS)]


def _add(seen: Counts, columns: list[Any]) -> None:
    missing_RC = np.stack([column.isna().to_numpy() for column in columns[1:]], 1).astype(float)
    seen.rows += len(columns[0])
    seen.clicks += int(columns[0].sum())
    seen.missing_CC += (missing_RC.T @ missing_RC).astype(np.int64)
    for column, field in enumerate(columns[1:]):
        present: npt.NDArray[Any] = field.dropna().to_numpy()
        value_R = present.astype(np.int64) if column < NUM_DENSE else _hexadecimal(present)
        keys, counts = np.unique(value_R, return_counts=True)
        merged, where = np.unique(np.concatenate([seen.keys[column], keys]), return_inverse=True)
        both = np.concatenate([seen.counts[column], counts]).astype(np.float64)
        seen.keys[column] = merged
        seen.counts[column] = np.bincount(where, both, len(merged)).astype(np.int64)


def _hexadecimal(present: npt.NDArray[Any]) -> Integers:
    if not len(present):
        return np.zeros(0, np.int64)
    text_R = present.astype(np.bytes_)
    if text_R.itemsize != 8:
        raise ValueError("a category is not eight hexadecimal digits")
    byte_R8 = np.frombuffer(text_R.tobytes(), np.uint8).reshape(-1, 8)
    digit_R8 = _DIGIT[byte_R8]
    if (digit_R8 < 0).any():
        raise ValueError("a category is not eight hexadecimal digits")
    return digit_R8 @ (16 ** np.arange(7, -1, -1, dtype=np.int64))
