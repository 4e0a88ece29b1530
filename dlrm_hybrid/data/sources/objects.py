"""Columns of Python's values, as frames and JSON hold them, to Arrow's."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from dlrm_hybrid.data.schema import CategoricalColumn, DenseColumn, Schema
from dlrm_hybrid.data.sources.arrow import ArrowError, Batch, pa
from dlrm_hybrid.data.sources.cells import (
    is_missing,
    number,
    plain_value,
    shown,
    split_list,
    text_of_category,
)

Column = DenseColumn | CategoricalColumn


def batch_of(columns: Mapping[str, Any], schema: Schema) -> Batch:
    """Convert columns of a frame, or lists of values, by name, to those that `read_values` takes.

    Raises:
        ValueError: a value cannot be read; names row, from 1, column and value.
    """
    of_name: dict[str, Column] = {item.name: item for item in (*schema.dense, *schema.categorical)}
    of_name |= {item.weights: item for item in schema.categorical if item.weights is not None}
    missing = frozenset(schema.missing_values)
    arrays = [_array(*pair, of_name.get(pair[0]), missing) for pair in columns.items()]
    return pa.record_batch(arrays, list(columns))


def _array(name: str, values: Any, column: Column | None, missing: Collection[str]) -> Any:
    ids = column if isinstance(column, CategoricalColumn) and column.name == name else None
    length = column.length if isinstance(column, DenseColumn) else column and column.max_length
    has_lists = (length or 1) > 1
    # Arrow refuses values of several types, and integers beyond 64 bits.
    with suppress(ArrowError, OverflowError, TypeError, ValueError):
        array = pa.array(values, from_pandas=True)
        # A column of text that was put together of others is in pieces.
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if not (has_lists and pa.types.is_primitive(array.type)):
            return array
    if hasattr(values, "notna"):
        values = values.astype(object).where(values.notna(), None)
    results = list[Any]()
    for row, cell in enumerate(values, 1):
        value = plain_value(cell, missing)
        try:
            items = _items(value, column and column.separator) if has_lists else (value,)
            read = list[Any]()
            for item in () if items is None else items:
                value = plain_value(item, missing)
                read.append(number(value) if ids is None else text_of_category(value, ids))
        except ValueError as error:
            raise ValueError(f"row {row}: column {name!r}: {shown(value)} {error}") from None
        results.append(None if items is None else read if has_lists else read[0])
    kind = pa.float64() if ids is None else pa.string()
    return pa.array(results, pa.list_(kind) if has_lists else kind)


def _items(value: Any, separator: str | None) -> Sequence[Any] | None:
    """The items of a list, or of text with the separator; None for a missing one."""
    if is_missing(value):
        return None
    if isinstance(value, str) and separator is not None:
        return split_list(value, separator)
    if isinstance(value, (list, tuple, np.ndarray)):
        return cast("Sequence[Any]", value)
    raise ValueError("is no list")
