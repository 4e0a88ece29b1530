"""Synthetic rows in the official format, and their plain reading."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_hybrid.data import manifest
from dlrm_hybrid.data.folder import Generated, PrepareOptions
from dlrm_hybrid.data.manifest import Semantics
from dlrm_hybrid.data.prepare import PrepareResult, prepare
from dlrm_hybrid.data.schemas.reading import builtin


def semantics(**changes: Any) -> Semantics:
    base = {"days": 7, "day_split": "equal_rows", "vocabulary": "all_days", "min_count": 1}
    base |= {"max_ind_range": 0, "on_bad_row": "error", "schema": builtin("criteo_kaggle")}
    return Semantics(**base | changes)


OPTIONS = PrepareOptions(
    semantics=semantics(),
    max_bad_rows=0,
    processes=1,
    block_bytes=1 << 22,
    overwrite=False,
    advice="ADVICE",
)


def options(**changes: Any) -> PrepareOptions:
    """Options with other values, of which some are of the semantics."""
    own = {name: changes.pop(name) for name in [*changes] if hasattr(OPTIONS, name)}
    return replace(OPTIONS, semantics=semantics(**changes), **own)


def run_prepare(
    raw: Path | list[Path] | Generated,
    output: Path,
    *,
    progress: Callable[[str, int, int | None], None] = lambda stage, done, total: None,
    say: Callable[[str], None] = lambda line: None,
    **changes: Any,
) -> PrepareResult:
    files = [raw] if isinstance(raw, Path) else raw
    return prepare(files, output, options(**changes), progress, say)


def make_lines(rows: int, seed: int = 0) -> list[bytes]:
    """Rows with repeated, rare, missing and literally zero categories, negatives and large ints."""
    rng = np.random.default_rng(seed)
    lines = []
    for _ in range(rows):
        fields = [b"%d" % rng.integers(2)]
        for _ in range(13):
            value = int(rng.integers(-3, 10 ** int(rng.integers(1, 10))))
            fields.append(b"" if rng.random() < 0.2 else b"%d" % value)
        for column in range(26):
            key = int(rng.zipf(1.3)) * 2654435761 % (1 << int(rng.integers(1, 33)))
            fields.append(b"" if rng.random() < 0.1 + column / 60 else b"%08x" % key)
        lines.append(b"\t".join(fields) + b"\n")
    return lines


def day_lengths(rows: int, days: int) -> list[int]:
    quotient, remainder = divmod(rows, days)
    return [quotient + (day < remainder) for day in range(days)]


def read_plainly(
    lines: Iterable[bytes], wanted: Semantics, lengths: list[int]
) -> tuple[np.ndarray, list[int]]:
    """Records by an obvious Python reading: [rows, 40] words, and the rows of each table."""
    rows = [line.rstrip(b"\r\n").split(b"\t") for line in lines]
    words = np.zeros((len(rows), 40), np.uint32)
    floats = words[:, :14].view(np.float32)
    floats[:, 0] = [int(row[0]) for row in rows]
    for column in range(1, 14):
        values = [max(int(row[column] or b"0"), 0) for row in rows]
        floats[:, column] = [math.log(value + 1.0) for value in values]
    known = sum(lengths[:-1]) if wanted.vocabulary == "train_days" else len(rows)
    shared = wanted.vocabulary == "train_days" or wanted.min_count > 1
    table_rows = []
    for column in range(14, 40):
        keys = [int(row[column] or b"0", 16) for row in rows]
        if wanted.max_ind_range:
            keys = [key % wanted.max_ind_range for key in keys]
        counts: dict[int, int] = {}
        for key in keys[:known]:
            counts[key] = counts.get(key, 0) + 1
        kept = [key for key, count in counts.items() if count >= wanted.min_count]
        ids = {key: number + shared for number, key in enumerate(kept)}
        words[:, column] = [ids.get(key, 0) for key in keys]
        table_rows.append(len(ids) + shared)
    return words, table_rows


def everything(folder: Path) -> dict[str, bytes]:
    """All files below a folder by relative name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def stored(folder: Path) -> np.ndarray:
    """All rows, those of the last part last: [rows, 40] words, label, dense values, ids."""
    label, dense, ids = (np.load(folder / f"{name}.npy") for name in ("label", "dense", "ids"))
    assert len(label) == manifest.read(folder).rows
    floats = np.concatenate([label[:, None], dense], axis=1)
    return np.concatenate([floats.view(np.uint32), ids.view(np.uint32)], axis=1)
