"""Files of rows as blocks: Criteo text, CSV with a header, Parquet; in bounded memory.

A row that cannot be read is an error that names file, row and column: no row goes without a score.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.sources.criteo import NUM_COLUMNS, column_name, parse
from dlrm_hybrid.data.sources.text import blocks as text_blocks
from dlrm_hybrid.predict.blocks import Block
from dlrm_hybrid.predict.frames import block_of
from dlrm_hybrid.types import DataError, ResourceError

ROWS_KEY = "predict.rows"
BLOCK_ROWS = 1 << 15
TABLES = (".parquet", ".csv")
LABEL_AND_TAB = b"0\t"


def read_blocks(
    paths: Sequence[Path],
    schema: Schema,
    keep: Sequence[str],
    block_bytes: int,
    on_bytes: Callable[[int], None],
) -> Iterator[Block]:
    """All rows of some files, in order.

    Args:
        paths: `.parquet`, `.csv`, or Criteo text, plain, `.gz` or `.zst`, with or without label.
        schema: of the rows that the model was trained on.
        keep: columns to pass on as they are.
        block_bytes: of text, parsed at a time.
        on_bytes: called with the bytes of all files that are done, as stored.

    Raises:
        DataError: a file is missing or damaged, a column is missing, or a value is none of its
            column.
        ResourceError: Parquet cannot be read here.
    """
    done = 0
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file ({ROWS_KEY})")
        if path.suffix == ".parquet":
            yield from _parquet(path, schema, keep)
        elif path.suffix == ".csv":
            yield from _csv(path, schema, keep)
        else:
            yield from _criteo(
                path, keep, block_bytes, lambda raw, before=done: on_bytes(before + raw)
            )
        done += path.stat().st_size
        on_bytes(done)


def require(path: Path) -> None:
    """Raise ResourceError if this file needs a package that is not installed."""
    if path.suffix == ".parquet":
        try:
            import_module("pyarrow.parquet")
        except ImportError:
            raise ResourceError(
                f"{path}: Parquet needs pyarrow, which is not installed: "
                "pip install 'dlrm-hybrid[parquet]'"
            ) from None


def _criteo(
    path: Path, keep: Sequence[str], block_bytes: int, on_bytes: Callable[[int], None]
) -> Iterator[Block]:
    names = [column_name(column) for column in range(1, NUM_COLUMNS + 1)]
    _check_columns(path, keep, names)
    has_label: bool | None = None
    for block in text_blocks([path], block_bytes, [xxhash.xxh3_128()]):
        text = block.text.tobytes()
        if has_label is None:
            has_label = text.partition(b"\n")[0].count(b"\t") != NUM_COLUMNS - 2
            if not has_label:
                _check_columns(path, keep, names[1:])
        if not has_label:
            lines = text.removesuffix(b"\n").replace(b"\n", b"\n" + LABEL_AND_TAB)
            text = LABEL_AND_TAB + lines + (b"\n" if text.endswith(b"\n") else b"")
        columns = parse(np.frombuffer(bytearray(text), np.uint8), 1)
        if columns.bad:
            bad = columns.bad[0]
            column = bad.column - (not has_label)
            line = block.first_line + bad.line
            raise DataError(f"{path}:{line}:{column}: {column_name(bad.column)}: {bad.reason}")
        first_line = block.first_line
        yield Block(
            dense_RI=columns.dense_RI,
            keys_FR=columns.keys_FR,
            label_R=columns.label_R if has_label else None,
            kept=_fields(text, keep, names),
            where=lambda row, first=first_line: f"{path}:{first + row}",
        )
        on_bytes(block.raw_bytes)


def _fields(text: bytes, keep: Sequence[str], names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Fields of some columns as they stand in text without faults."""
    if not keep:
        return {}
    import pandas as pd

    found = pd.read_csv(
        BytesIO(text), sep="\t", header=None, names=list(names), usecols=list(keep), dtype=str,
        keep_default_na=False, quoting=3, encoding="utf-8",
    )  # fmt: skip
    return {name: np.asarray(found[name], object) for name in keep}


def _parquet(path: Path, schema: Schema, keep: Sequence[str]) -> Iterator[Block]:
    require(path)
    parquet, arrow = import_module("pyarrow.parquet"), import_module("pyarrow")
    first = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BLOCK_ROWS):
                frame = batch.to_pandas()
                yield block_of(frame, schema, str(path), keep, _numbered(path, first))
                first += len(frame)
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(f"{path}: cannot be read as Parquet: {reason} ({ROWS_KEY})") from error


def _csv(path: Path, schema: Schema, keep: Sequence[str]) -> Iterator[Block]:
    import pandas as pd

    first = 0
    try:
        chunks: Any = pd.read_csv(path, dtype=str, keep_default_na=False, chunksize=BLOCK_ROWS)
        for frame in chunks:
            yield block_of(frame, schema, str(path), keep, _numbered(path, first))
            first += len(frame)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as CSV: {error} ({ROWS_KEY})") from error


def _numbered(path: Path, first: int) -> Callable[[int], str]:
    return lambda row: f"{path}: row {first + row:,} (counted from 0)"


def _check_columns(path: Path, keep: Sequence[str], names: Sequence[str]) -> None:
    missing = [name for name in keep if name not in names]
    if missing:
        raise DataError(
            f"{path}: has no column {', '.join(missing)} (predict.keep); Criteo text has "
            f"{names[0]} … {names[-1]}"
        )
