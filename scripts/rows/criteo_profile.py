"""Measures raw Criteo rows and writes the aggregate profile that synthetic rows are drawn from.

    python scripts/rows/criteo_profile.py train.txt --out criteo_kaggle.json

When the rows are only a sample, `--cardinalities` takes the published number of categories of each
column, a missing value included, to which the frequency curve is extrapolated beyond the sample.
The profile holds counts and shares, no row and no category value. Memory grows with the distinct
categories (16 bytes each), not with the rows.

Shapes: R rows of a block, C = 39 columns.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import fit_profile
import numpy as np
import numpy.typing as npt
import pandas as pd
import xxhash

from dlrm_hybrid.data import profile, synthetic
from dlrm_hybrid.data.manifest import stamp
from dlrm_hybrid.data.profile import NUM_CATEGORICAL, NUM_DENSE, WEIGHT_ONE, Staircase
from dlrm_hybrid.data.sources.text import Lines, blocks
from dlrm_hybrid.rng import fold
from dlrm_hybrid.types import DataError, DlrmError

# Columns (0 … 25) whose latent vectors the teacher multiplies: small tables that carry most rows
# in a few categories, so that a model meets each pair often enough to learn its product.
PAIRS = ((5, 13), (13, 16), (16, 22), (5, 22), (24, 16), (19, 13))
NUM_COLUMNS = 1 + NUM_DENSE + NUM_CATEGORICAL
BLOCK_BYTES = 1 << 26
MIN_ROWS = 10_000  # fewer would show single rows
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
        DataError: a file is damaged or holds other rows, or all files together hold fewer than
            MIN_ROWS rows; names them.
    """
    width = NUM_COLUMNS - 1
    none = np.zeros(0, np.int64)
    seen = Counts(0, 0, np.zeros((width, width), np.int64), [none] * width, [none] * width)
    for path in paths:
        stamp(path)  # refuses what is not there
    for block in blocks(paths, BLOCK_BYTES, [xxhash.xxh3_128() for _ in paths]):
        _check_columns(block, paths[block.file])
        try:
            _add(seen, _columns(block))
        except ValueError as error:  # pandas' own errors are ValueErrors
            last = block.first_line + block.lines - 1
            where = f"{paths[block.file]}: lines {block.first_line} to {last}"
            raise DataError(f"{where}: cannot be measured: {error}") from error
        progress(seen.rows)
    if seen.rows < MIN_ROWS:
        names = ", ".join(str(path) for path in paths)
        raise DataError(f"{names}: {seen.rows} rows; a profile needs at least {MIN_ROWS}")
    return seen


def integer_columns(seen: Counts) -> tuple[Staircase, ...]:
    """Staircases of I1 … I13."""
    return tuple(
        _staircase(seen, column, fit_profile.integer_steps(seen.keys[column], seen.counts[column]))
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
            steps = fit_profile.rank_steps(seen.counts[column], support)
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


def _staircase(seen: Counts, column: int, steps: fit_profile.Steps) -> Staircase:
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


def _check_columns(block: Lines, path: Path) -> None:
    ends = np.flatnonzero(block.text == ord("\n"))
    if len(ends) < block.lines:
        ends = np.append(ends, len(block.text))
    tabs = np.searchsorted(np.flatnonzero(block.text == ord("\t")), ends)
    wrong = np.flatnonzero(np.diff(tabs, prepend=0) != NUM_COLUMNS - 1)
    if len(wrong):
        line = block.first_line + int(wrong[0])
        raise DataError(f"{path}:{line}: not {NUM_COLUMNS} columns between tabs")


def _columns(block: Lines) -> list[Any]:
    """The block as 40 pandas columns."""
    types: dict[int, str] = {0: "int8"}
    types |= dict.fromkeys(range(1, 1 + NUM_DENSE), "float64")
    types |= dict.fromkeys(range(1 + NUM_DENSE, NUM_COLUMNS), "str")
    frame: Any = cast(Any, pd).read_csv(
        io.BytesIO(block.text.tobytes()),
        sep="\t",
        header=None,
        names=list(types),
        dtype=types,
        keep_default_na=False,
        na_values=[""],
    )
    return [frame[column] for column in types]


def _add(seen: Counts, columns: list[Any]) -> None:
    if not columns[0].isin((0, 1)).all():
        raise ValueError("a label is neither 0 nor 1")
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


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("raw", nargs="+", type=Path, help="files in the official row format")
    parser.add_argument("--out", required=True, type=Path, help="the profile, JSON")
    parser.add_argument("--cardinalities", help="26 published numbers joined by '-'")
    parser.add_argument("--source", default="unnamed rows", help="what the rows are, in words")
    parser.add_argument("--head-ranks", type=int, default=64, help="ranks with own effects")
    parser.add_argument("--log-loss", type=float, default=0.45, help="of the teacher, nats")
    parser.add_argument(
        "--mixture",
        type=float,
        nargs=3,
        default=(1.0, 0.8, 0.8),
        help="deviations of integer, categorical and interaction effects, up to a factor",
    )
    options = parser.parse_args()
    try:
        made = _measure(options)
    except DlrmError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    options.out.write_text(profile.dumps(made), encoding="utf-8")
    scores = synthetic.teacher_scores(range(200_000), 1, profile.read(options.out))
    print(f"{options.out}: {options.out.stat().st_size} bytes, digest {made.digest}")
    print(f"teacher on 200000 rows of seed 1: {scores}")
    return 0


def _measure(options: argparse.Namespace) -> profile.Profile:
    seen = count(options.raw, lambda rows: print(f"{rows} rows", file=sys.stderr))
    known = seen_cardinalities(seen)
    published = tuple(int(text) for text in (options.cardinalities or "").split("-") if text)
    if published and len(published) != len(known):
        raise DlrmError(f"--cardinalities: {len(published)} numbers, {len(known)} are needed")
    curve = "a Zipf-Mandelbrot curve up to the published cardinality, fitted to the categories seen"
    tail = curve if published else "as measured"
    made = profile.Profile(
        format=profile.FORMAT,
        provenance={
            "source": options.source,
            "rows": seen.rows,
            "clicks": seen.clicks,
            "categories_seen": known,
            "tail": f"ranks seen fewer than {fit_profile.HEAD_COUNT} times: {tail}",
            "teacher": "made up; only its click rate is measured",
            "integers": f"cut {fit_profile.TAIL_ROWS} rows before both extremes",
        },
        click_rate=seen.clicks / seen.rows,
        cardinalities=published or known,
        integers=integer_columns(seen),
        categoricals=categorical_columns(seen, published or known),
        teacher=fit_profile.blank_teacher(fold(0, "teacher"), options.head_ranks, PAIRS),
    )
    return fit_profile.calibrated(made, tuple(options.mixture), options.log_loss)


if __name__ == "__main__":
    sys.exit(main())
