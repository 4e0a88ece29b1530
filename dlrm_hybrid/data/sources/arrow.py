"""Arrow's modules, which have no type hints, and conversions of its arrays to common types."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from typing import Any
from uuid import UUID

pa: Any = import_module("pyarrow")
pc: Any = import_module("pyarrow.compute")
pa_csv: Any = import_module("pyarrow.csv")
parquet: Any = import_module("pyarrow.parquet")
ArrowError: type[Exception] = pa.ArrowException
ArrowInvalid: type[Exception] = pa.ArrowInvalid
Batch = Any
"""A `pyarrow.RecordBatch`."""


def usual(array: Any) -> Any:
    """Cast an array to a type that all of Arrow's kernels support.

    Many lack views, run-end encoding, small decimals and extension types. UUIDs become text.
    """
    kind = array.type
    if pa.types.is_run_end_encoded(kind):
        return usual(pc.run_end_decode(array))
    if isinstance(kind, pa.UuidType):
        distinct = pc.dictionary_encode(array.storage)
        words = [str(UUID(bytes=value)) for value in distinct.dictionary.to_pylist()]
        return pa.DictionaryArray.from_arrays(distinct.indices, pa.array(words, pa.string()))
    if isinstance(kind, pa.BaseExtensionType):
        return usual(array.storage)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        return usual(_list(array))
    usual_kind = _usual_type(kind)
    return array if usual_kind == kind else pc.cast(array, usual_kind)


def _list(array: Any) -> Any:
    """Convert a list view to lists; Arrow's own cast makes invalid arrays."""
    lengths = pc.fill_null(pc.list_value_length(array), 0)
    ends = pc.cumulative_sum(pc.cast(lengths, pa.int64()))
    offsets = pa.concat_arrays([pa.array([0], pa.int64()), ends])
    return pa.LargeListArray.from_arrays(offsets, array.flatten(), mask=array.is_null())


def _usual_type(kind: Any) -> Any:
    types = pa.types
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind) or types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_decimal32(kind) or types.is_decimal64(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _usual_type(kind.value_type), kind.ordered)
    if types.is_fixed_size_list(kind):
        return pa.list_(_usual_type(kind.value_type), kind.list_size)
    if types.is_list(kind):
        return pa.list_(_usual_type(kind.value_type))
    if types.is_large_list(kind):
        return pa.large_list(_usual_type(kind.value_type))
    return kind


def plain(array: Any) -> Any:
    """Decode an array's dictionary and cast text to bytes, so that UTF-8 is checked row by row."""
    types, array = pa.types, usual(array)
    if types.is_dictionary(array.type):
        return plain(array.dictionary_decode())
    if types.is_string(array.type):
        return pc.cast(array, pa.binary())
    return pc.cast(array, pa.large_binary()) if types.is_large_string(array.type) else array


def category_values(array: Any) -> list[Any]:
    """Values of a plain array to be used as categories; dates and times as text like in CSV.

    Times are in UTC, and fractions of a second have no trailing zeros.

    Raises:
        ArrowError: values of this type cannot be categories.
    """
    types, kind = pa.types, array.type
    if is_text(kind):
        with suppress(ArrowInvalid):  # not all is UTF-8: bytes, of which each value is checked
            return pc.cast(array, pa.string()).to_pylist()
    if types.is_timestamp(kind) and kind.tz is not None:
        array = pc.cast(array, pa.timestamp(kind.unit))  # dropping the zone leaves UTC
    if types.is_date(kind) or types.is_time(kind) or types.is_timestamp(kind):
        text = pc.cast(array, pa.string())
        return pc.replace_substring_regex(text, r"(?:\.0+|(\.\d*[1-9])0+)$", r"\1").to_pylist()
    if types.is_temporal(kind) or types.is_nested(kind):
        raise pa.ArrowInvalid("no categories are of this type")
    return array.to_pylist()


def is_text(kind: Any) -> bool:
    """Whether a plain array of this type holds text."""
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def is_list(kind: Any) -> bool:
    """Whether an array of this type holds lists."""
    types = pa.types
    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
