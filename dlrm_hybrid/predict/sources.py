"""Reads rows to score in blocks, from a DataFrame or files: Criteo text, CSV, Parquet, .npy.

Memory for files is bounded. A row that cannot be read is an error that names file, row and column,
as every row must get a score.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.bounds import Extra
from dlrm_hybrid.data.schema import CategoricalColumn, Schema
from dlrm_hybrid.data.sources import files
from dlrm_hybrid.data.sources.arrow import ArrowError, is_text, pa, plain, usual
from dlrm_hybrid.data.sources.cells import number, plain_value, shown, text_of_category
from dlrm_hybrid.data.sources.columns import Coded, Values
from dlrm_hybrid.data.sources.criteo import NUM_COLUMNS, column_name, parse
from dlrm_hybrid.data.sources.files import open_source
from dlrm_hybrid.data.sources.text import blocks as text_blocks
from dlrm_hybrid.data.sources.values import as_text, read_values, without
from dlrm_hybrid.types import DataError

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRows:
    """A block of rows to score.

    Attributes:
        values: features, and labels if the source has them.
        kept: values of the columns to keep by name, (R,), as arrays of numpy or Arrow.
        where: the origin of a row of the block, from 0, for messages.
    """

    values: Values
    kept: Mapping[str, Any]
    where: Callable[[int], str]


ROWS_KEY = "predict.rows"
EXTRA_KEY = "predict.extra"
FRAME = "DataFrame"
TABLES = (".parquet", ".csv", ".npy")
LABEL_AND_TAB = b"0\t"


def is_table(path: Path, schema: Schema) -> bool:
    """Whether a file is a table with named columns, not Criteo text."""
    return schema.format != "criteo" or path.suffix in TABLES


def read_blocks(
    paths: Sequence[Path],
    schema: Schema,
    keep: Sequence[str],
    block_bytes: int,
    on_bytes: Callable[[int], None],
    extra: Extra = "error",
) -> Iterator[NewRows]:
    """Yield all rows of some files, in order.

    Args:
        paths: `.parquet`, `.csv` or `.npy` files, or Criteo text, plain, `.gz` or `.zst`, with or
            without label. With another schema than Criteo's, every file is a table.
        schema: schema of the training rows, without a split.
        keep: columns to pass on unchanged.
        on_bytes: called with the bytes done of all files, before decompression.

    Raises:
        DataError: a file is missing or damaged, a column is missing or unknown, or a value is
            invalid.
    """
    done_bytes = 0
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path}: no such file ({ROWS_KEY})")
        if is_table(path, schema):
            for block in _table(path, schema, keep, extra, block_bytes):
                yield block
                on_bytes(done_bytes)
        else:
            start = done_bytes
            yield from _criteo(path, keep, block_bytes, lambda raw: on_bytes(start + raw))  # noqa: B023
        done_bytes += path.stat().st_size
        on_bytes(done_bytes)


def frame_block(frame: pd.DataFrame, schema: Schema, extra: Extra = "error") -> NewRows:
    """Read all rows of a frame; raises DataError for missing or unknown columns or bad values."""
    present = [str(name) for name in frame.columns]
    names = _names(FRAME, present, schema, (), extra)
    arrays = [_array(frame.iloc[:, present.index(name)], name, schema) for name in names]
    row_N = np.arange(1, len(frame) + 1, dtype=np.int64)
    block = files.Block(pa.record_batch(arrays, names), row_N, ())
    return _of_columns(block, schema, FRAME, ())


def _array(values: Any, name: str, schema: Schema) -> Any:
    try:
        array = pa.array(values, from_pandas=True)
        # A column of text that was put together of others is in pieces.
        return array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
    except (ArrowError, OverflowError, TypeError, ValueError):
        pass  # values of several types, or integers beyond 64 bits
    column = next((column for column in schema.categorical if column.name == name), None)
    missing, converted = frozenset(schema.missing_values), list[Any]()
    for row, value in enumerate(values.astype(object).where(values.notna(), None), 1):
        value = plain_value(value, missing)
        try:
            converted.append(number(value) if column is None else _texts(value, column, missing))
        except ValueError as error:
            where = f"{FRAME}: row {row}: column {name!r}"
            raise DataError(f"{where}: {shown(value)} {error} ({ROWS_KEY})") from error
    return pa.array(converted, from_pandas=True)


def _texts(value: Any, column: CategoricalColumn, missing: Collection[str]) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        values = [plain_value(item, missing) for item in cast("Sequence[Any]", value)]
        return [text_of_category(item, column) for item in values]
    return text_of_category(value, column)


def _table(
    path: Path, schema: Schema, keep: Sequence[str], extra: Extra, block_bytes: int
) -> Iterator[NewRows]:
    source = open_source(path, schema.dialect, block_bytes, lambda piece: None, ROWS_KEY)
    names = _names(str(path), source.names, schema, keep, extra)
    for block in source.blocks(names):
        yield _of_columns(block, schema, str(path), keep)


def _names(
    source: str, present: Sequence[str], schema: Schema, keep: Sequence[str], extra: Extra
) -> list[str]:
    key = EXTRA_KEY if source != FRAME else "extra"
    if fault := schema.columns_fault(present, extra, keep, key):
        raise DataError(f"{source}: {fault} ({ROWS_KEY})")
    features = [name for name in schema.features if name in present]
    labels = [name for name in schema.label_columns if name in present]
    names = list(dict.fromkeys((*features, *labels, *keep)))
    twice = [name for name in names if present.count(name) > 1]
    if twice:
        raise DataError(f"{source}: column {twice[0]!r} is there twice ({ROWS_KEY})")
    return names


def _with_defaults(columns: Any, rows: int, schema: Schema) -> Any:
    for name, value in schema.defaults.items():
        if name not in columns.schema.names:
            default = pa.scalar(None, pa.string()) if value == "" else pa.scalar(value)
            columns = columns.append_column(name, pa.repeat(default, rows))
    return columns


def _of_columns(block: files.Block, schema: Schema, source: str, keep: Sequence[str]) -> NewRows:
    block = replace(block, columns=_with_defaults(block.columns, len(block.row_N), schema))
    names: list[str] = block.columns.schema.names
    # Rows whose labels are partly missing are scored as rows without labels.
    labels = all(
        name in names and not _has_missing(block.columns.column(name), schema)
        for name in schema.label_columns
    )
    values, bad = read_values(block, schema, source, labels=labels)
    if bad:
        raise DataError(f"{source}: {bad[0].where} ({ROWS_KEY})")
    kept: dict[str, Any] = {}
    for name in keep:
        array = block.columns.column(name)
        if not pa.types.is_fixed_size_binary(array.type):  # bytes, not text
            array = plain(array)
        kept[name], not_text = as_text(array) if is_text(array.type) else (array, {})
        for index, reason in not_text.items():
            where = f"{source}: row {int(block.row_N[index])}"
            raise DataError(f"{where}: column {name!r}: {reason} (predict.keep)")
    row_N = values.row_N
    return NewRows(
        values=values,
        kept=kept,
        where=lambda row: f"{source}: row {int(row_N[row])}",
    )


def _has_missing(array: Any, schema: Schema) -> bool:
    return bool(without(usual(array), schema.missing_values).null_count)


def _criteo(
    path: Path, keep: Sequence[str], block_bytes: int, on_bytes: Callable[[int], None]
) -> Iterator[NewRows]:
    names = [column_name(column) for column in range(1, NUM_COLUMNS + 1)]
    _check_columns(path, keep, names)
    has_label: bool | None = None
    for block in text_blocks([path], block_bytes, [xxhash.xxh3_128()], ROWS_KEY):
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
        first_line, rows = block.first_line, len(columns.label_R)
        index_R = np.arange(rows, dtype=np.int32)
        yield NewRows(
            values=Values(
                row_N=np.arange(first_line, first_line + rows),
                label_N=columns.label_R if has_label else None,
                dense_NI=columns.dense_RI,
                categories=tuple(Coded(index_R, keys_R) for keys_R in columns.keys_FR),
            ),
            kept=_fields(text, keep, names),
            where=lambda row, first=first_line: f"{path}:{first + row}",
        )
        on_bytes(block.raw_bytes)


def _fields(text: bytes, keep: Sequence[str], names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """Fields of some columns, unparsed, from text without faults."""
    if not keep:
        return {}
    import pandas as pd

    frame = pd.read_csv(
        BytesIO(text), sep="\t", header=None, names=list(names), usecols=list(keep), dtype=str,
        keep_default_na=False, quoting=3, encoding="utf-8",
    )  # fmt: skip
    return {name: np.asarray(frame[name], object) for name in keep}


def _check_columns(path: Path, keep: Sequence[str], names: Sequence[str]) -> None:
    missing = [name for name in keep if name not in names]
    if missing:
        raise DataError(
            f"{path}: has no column {', '.join(missing)} (predict.keep); Criteo text has "
            f"{names[0]} … {names[-1]}"
        )
