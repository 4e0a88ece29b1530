"""Arrow's modules, which have no types."""

from __future__ import annotations

from importlib import import_module
from typing import Any

pa: Any = import_module("pyarrow")
pc: Any = import_module("pyarrow.compute")
pa_csv: Any = import_module("pyarrow.csv")
parquet: Any = import_module("pyarrow.parquet")
ArrowError: type[Exception] = pa.ArrowException
ArrowInvalid: type[Exception] = pa.ArrowInvalid
Batch = Any
"""A `pyarrow.RecordBatch`."""


def plain(array: Any) -> Any:
    """An array without a dictionary, and text as bytes: whether they are UTF-8 is seen by row."""
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        return plain(array.dictionary_decode())
    if types.is_string(kind) or types.is_string_view(kind) or types.is_binary_view(kind):
        return pc.cast(array, pa.binary())
    return pc.cast(array, pa.large_binary()) if types.is_large_string(kind) else array


def is_text(kind: Any) -> bool:
    """Whether a plain array of this type holds text."""
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def is_list(kind: Any) -> bool:
    """Whether each value is a list."""
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
