"""Columns of Python's values, as frames and JSON hold them, to Arrow arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, cast

import numpy as np

from dlrm_hybrid.data.schema import CategoricalColumn, Schema
from dlrm_hybrid.data.sources.arrow import ArrowError, pa
from dlrm_hybrid.data.sources.cells import (
    is_missing,
    number,
    plain_value,
    shown,
    split_list,
    text_of_category,
)


class _Form(NamedTuple):
    """What a column holds: categories of a column or numbers, one a row or lists of them."""

    column: CategoricalColumn | None = None
    has_lists: bool = False
    separator: str | None = None

    def item(self, value: Any) -> Any:
        """Read a single value: a category as text."""
        return number(value) if self.column is None else text_of_category(value, self.column)


def array_of(values: Any, name: str, schema: Schema) -> Any:
    """Convert a column of a frame, or a list of its values, to an array for `read_values`.

    Raises:
        ValueError: a value cannot be read; names row, from 1, column and value.
    """
    form, missing, results = _form(name, schema), frozenset(schema.missing_values), list[Any]()
    # Arrow refuses values of several types, and integers beyond 64 bits.
    with suppress(ArrowError, OverflowError, TypeError, ValueError):
        array = pa.array(values, from_pandas=True)
        # A column of text that was put together of others is in pieces.
        array = array.combine_chunks() if isinstance(array, pa.ChunkedArray) else array
        if not (form.has_lists and pa.types.is_primitive(array.type)):
            return array
    if hasattr(values, "notna"):
        values = values.astype(object).where(values.notna(), None)
    for row, cell in enumerate(values, 1):
        value = plain_value(cell, missing)
        try:
            items = _items(value, form) if form.has_lists else (value,)
            read = list[Any]()
            for item in () if items is None else items:
                value = plain_value(item, missing)
                read.append(form.item(value))
        except ValueError as error:
            raise ValueError(f"row {row}: column {name!r}: {shown(value)} {error}") from None
        results.append(None if items is None else read if form.has_lists else read[0])
    kind = pa.float64() if form.column is None else pa.string()
    return pa.array(results, pa.list_(kind) if form.has_lists else kind)


def _form(name: str, schema: Schema) -> _Form:
    """The form of a feature; labels that are mixed of several types are numbers."""
    for dense in schema.dense:
        if dense.name == name:
            return _Form(None, dense.length > 1, dense.separator)
    for column in schema.categorical:
        if name in (column.name, column.weights):
            ids = column if name == column.name else None
            return _Form(ids, column.max_length > 1, column.separator)
    return _Form()


def _items(value: Any, form: _Form) -> Sequence[Any] | None:
    """The items of a list, or of text with the separator; None for a missing one."""
    if is_missing(value):
        return None
    if isinstance(value, str) and form.separator is not None:
        return split_list(value, form.separator)
    if isinstance(value, (list, tuple, np.ndarray)):
        return cast("Sequence[Any]", value)
    raise ValueError("is no list")
