"""Parses the columns of a block to labels, numbers and categories; finds bad rows.

Each distinct category of a block is parsed once, so the cost of a row hardly depends on the kind of
its columns. Transforms that need other rows are left to the caller.

Shapes: N rows of a block, I dense columns, M ids of a column, D distinct categories of a column.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from dlrm_hybrid.arrays import Bools, Float64s, Int64s
from dlrm_hybrid.data.schema import (
    ByFraction,
    ByTime,
    CategoricalColumn,
    DenseColumn,
    Label,
    Schema,
)
from dlrm_hybrid.data.sources.arrow import (
    ArrowError,
    Batch,
    category_values,
    is_list,
    is_text,
    pa,
    pc,
    plain,
    usual,
)
from dlrm_hybrid.data.sources.cells import (
    FORM,
    JSON,
    NOT_UTF8,
    NUMBER,
    Key,
    instant,
    is_missing,
    keys_of,
    missing_key,
    number,
    shown,
    split_list,
)
from dlrm_hybrid.data.sources.columns import Coded, LabelValue, Values, transformed
from dlrm_hybrid.data.sources.files import BadRow, Block
from dlrm_hybrid.types import DataError


class _Found(NamedTuple):
    """A parsed column: its values, and the reason for each bad row by index in the block."""

    values: Any
    bad: Mapping[int, str]


def read_values(
    block: Block, schema: Schema, path: str, labels: bool
) -> tuple[Values, list[BadRow]]:
    """Parse the fields of a block of rows into numbers and categories.

    Args:
        labels: whether rows have labels and parts; False for rows to be scored.

    Returns:
        the good rows, and the bad ones in order, with the first fault of each.

    Raises:
        DataError: the type of a column does not fit its kind in the schema.
    """
    columns = _usual(block.columns, path, schema.missing_values)
    results = _columns(columns, schema, path, labels)
    faults: dict[int, tuple[str, str]] = {}
    for (name, _), column in results.items():
        for index, reason in column.bad.items():
            faults.setdefault(index, (name, reason))
    row_N = block.row_N
    bad = [
        BadRow(int(row_N[index]), name, reason, _raw(columns.slice(index, 1)))
        for index, (name, reason) in sorted(faults.items())
    ]
    if faults:
        kept_N = np.ones(len(row_N), np.bool_)
        kept_N[list(faults)] = False
        good_rows = columns.filter(pa.array(kept_N))
        results, row_N = _columns(good_rows, schema, path, labels), row_N[kept_N]
    dense = [results[column.name, ""].values for column in schema.dense]
    targets = [results[label.column, label].values for label in schema.labels if labels]
    several = [label_N for label_N, _ in targets]
    values = Values(
        row_N=row_N,
        label_N=np.stack(several, 1) if len(several) > 1 else several[0] if several else None,
        positives=frozenset(value for _, positives in targets for value in positives),
        dense_NI=np.column_stack(dense) if dense else np.empty((len(row_N), 0)),
        categories=tuple(results[column.name, ""].values for column in schema.categorical),
        **{
            role: found.values
            for (_, role), found in results.items()
            if isinstance(role, str) and role
        },
    )
    return values, sorted([*block.odd, *bad], key=lambda bad_row: bad_row.row)


_Results = dict[tuple[str, str | Label], _Found]
"""Parsed columns by name, and by the label or field of `Values` they are for if no features."""


def _raw(row: Batch) -> str:
    try:
        return str(row.to_pylist()[0])
    except UnicodeDecodeError:  # Parquet's text may be any bytes
        return "not UTF-8"
    except (OverflowError, ValueError):  # or times out of Python's range
        return "not to be shown"


def _usual(batch: Batch, path: str, missing: Sequence[str]) -> Batch:
    """Cast columns to types that Arrow's kernels support, with nulls for missing values."""

    def read(array: Any) -> Any:
        array = usual(array)
        # A column without any value may be of any type, as pandas and Arrow happen to guess.
        return pa.nulls(len(array)) if array.null_count == len(array) else without(array, missing)

    names: list[str] = batch.schema.names
    columns = zip(names, batch.columns, strict=True)
    return pa.record_batch([_at(name, path, read, array) for name, array in columns], names)


def without(array: Any, missing: Sequence[str]) -> Any:
    """Replace words for missing values in text by nulls; other arrays are unchanged."""
    types, kind = pa.types, array.type
    if types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(array.indices, without(array.dictionary, missing))
    is_words = is_text(kind) or types.is_string(kind) or types.is_large_string(kind)
    if not missing or not is_words:
        return array
    is_word = pc.is_in(array, value_set=pc.cast(pa.array(missing, pa.string()), kind))
    return pc.if_else(is_word, pa.scalar(None, kind), array)


def _at(name: str, path: str, read: Callable[[Any], Any], array: Any) -> Any:
    """Apply `read` to a column; an ArrowError becomes a DataError that names it."""
    try:
        return read(array)
    except ArrowError as error:
        first = str(error).splitlines()[0]
        raise DataError(f"{path}: column {name!r}: {array.type}: {first} (data.schema)") from error


def _columns(batch: Batch, schema: Schema, path: str, labels: bool) -> _Results:
    results: _Results = {}
    words = schema.missing_values

    def take(name: str, role: str | Label, read: Callable[[Any], _Found]) -> None:
        array: Any = batch.column(batch.schema.get_field_index(name))
        results[name, role] = _at(name, path, read, array)

    for label in schema.labels if labels else ():
        take(label.column, label, lambda array, of=label: _label(plain(array), of))
    if labels and schema.weight is not None:
        take(schema.weight, "weight_N", lambda array: _weight(plain(array)))
    for dense in schema.dense:
        take(dense.name, "", lambda array, column=dense: _dense(array, column, path, words))
    for bag in schema.categorical:
        take(bag.name, "", lambda array, column=bag: _categories(array, column, path, words))
    _add_weights(results, batch, schema, path)
    split = schema.split if labels else None
    if isinstance(split, ByTime):
        is_text = isinstance(split.test_from, str)
        take(split.column, "time_N", lambda array: _time(plain(array), is_text))
    if isinstance(split, ByFraction) and split.column is not None:
        take(split.column, "drawn_N", _hashes)
    if labels and schema.group is not None:
        take(schema.group, "group_N", _hashes)
    return results


def _add_weights(results: _Results, batch: Batch, schema: Schema, path: str) -> None:
    for column in map(schema.categorical.__getitem__, schema.weighted):
        name, coded = column.weights or "", results[column.name, ""]
        ids, array = (
            batch.column(batch.schema.get_field_index(key)) for key in (column.name, name)
        )
        args = ids, column, path, schema.missing_values
        weights = _at(name, path, lambda array, args=args: _id_weights(array, *args), array)
        weighted = replace(coded.values, weight_M=weights.values)
        results |= {(column.name, ""): coded._replace(values=weighted), (name, ""): weights}


def _numbers(array: Any) -> _Found:
    """Parse numbers to float64, NaN for missing ones."""
    if not is_text(array.type):
        array = pc.cast(array, pa.float64(), safe=False)
        return _Found(np.asarray(array.to_numpy(zero_copy_only=False), np.float64), {})
    array, bad = as_text(array)
    try:
        x_N = np.array(pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False), np.float64)
        odd_N = np.isnan(x_N)  # Arrow accepts more spellings of NaN than `number`
        odd_N &= array.is_valid().to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid:
        odd = pc.invert(pc.match_substring_regex(array, f"^{NUMBER}$")).fill_null(False)
        odd_N = odd.to_numpy(zero_copy_only=False)
        numbers = pc.utf8_trim_whitespace(pc.if_else(odd, pa.scalar(None, array.type), array))
        x_N = np.array(pc.cast(numbers, pa.float64()).to_numpy(zero_copy_only=False), np.float64)
    parse = functools.cache(number)
    for index, text in zip(
        np.flatnonzero(odd_N).tolist(), array.filter(pa.array(odd_N)).to_pylist(), strict=True
    ):
        try:
            x_N[index] = parse(text)
        except ValueError as error:
            bad.setdefault(index, f"{shown(text)} {error}")
    return _Found(x_N, bad)


def _label(array: Any, label: Label) -> _Found:
    """Parse labels: the values are an array, and the `positives` of `Values` that it has."""
    if keys := wanted_keys(label):
        return _is_positive(array, label, keys)
    numbers = _numbers(array)
    label_N: Float64s = numbers.values
    bad = dict(numbers.bad)
    if label.above is not None:
        label_N = np.where(np.isnan(label_N), label_N, label_N > label.above)
    for index in np.flatnonzero((label_N != 0) & (label_N != 1)).tolist():
        value = array[index].as_py()
        reason = "is empty" if value in (None, b"") else f"{shown(value)} is neither 0 nor 1"
        bad.setdefault(index, reason)
    return _Found((label_N.astype(np.float32), ()), bad)


def wanted_keys(label: Label) -> list[Key]:
    """The categories that are labels of 1 (`positive`); none if numbers say it."""
    return keys_of(label.positive or (), CategoricalColumn(name="label"))[0]


def _is_positive(array: Any, label: Label, keys: Sequence[Key]) -> _Found:
    if pa.types.is_floating(array.type):
        raise pa.ArrowInvalid("`positive` takes texts or whole numbers, of floats use `above`")
    coded, bad = _coded(array, CategoricalColumn(name="label"), None)
    is_positive_D = np.isin(np.array(coded.keys, object), keys)
    bad = dict(bad)
    for index in np.flatnonzero(_is_empty(array)).tolist():
        bad.setdefault(index, "is empty")
    indices: list[int] = np.unique(coded.index_M).tolist()
    positives = [LabelValue(label, coded.keys[index]) for index in indices if is_positive_D[index]]
    return _Found((is_positive_D[coded.index_M].astype(np.float32), positives), bad)


def _weight(array: Any) -> _Found:
    weight_N, bad = _numbers(array)
    bad = dict(bad)
    with np.errstate(over="ignore"):
        narrow_N = weight_N.astype(np.float32)
    for index in np.flatnonzero(~((narrow_N >= 0) & np.isfinite(narrow_N))).tolist():
        reason = f"{shown(array[index].as_py())} is no weight: it must be finite and at least 0"
        bad.setdefault(index, "is empty" if np.isnan(weight_N[index]) else reason)
    return _Found(narrow_N, bad)


def _dense(array: Any, column: DenseColumn, path: str, missing: Sequence[str]) -> _Found:
    array = plain(array)
    if column.length > 1:
        return _dense_lists(array, column, path, missing)
    if is_list(array.type):
        raise DataError(
            f"{path}: column {column.name!r}: {array.type} where the schema has one number; "
            "length takes lists of so many"
        )
    x_N, bad = _numbers(array)
    x_N, faults = transformed(x_N, column)
    reasons = {index: f"{shown(array[index].as_py())} {fault}" for index, fault in faults.items()}
    return _Found(x_N, {**reasons, **bad})


def _dense_lists(array: Any, column: DenseColumn, path: str, missing: Sequence[str]) -> _Found:
    array, no_lists = _lists(without(array, ("",)), column, path)
    read_NL, bad = lists_of_numbers(array, column.length, missing)
    x_M, faults = transformed(read_NL.reshape(-1), column)
    reasons = {
        at // column.length: f"{shown(float(read_NL.flat[at]))} {fault}"
        for at, fault in reversed(faults.items())
    }
    return _Found(x_M.reshape(read_NL.shape), {**reasons, **bad, **no_lists})


def _time(array: Any, is_instant: bool) -> _Found:
    if not is_instant:
        numbers = _numbers(array)
        missing = np.flatnonzero(np.isnan(numbers.values)).tolist()
        return _Found(numbers.values, {**dict.fromkeys(missing, "is empty"), **numbers.bad})
    types, kind = pa.types, array.type
    array, bad = as_text(array) if is_text(kind) else (array, {})
    times = _arrow_times(array) if is_text(kind) else array
    if types.is_date(kind) or types.is_null(kind):
        times = pc.cast(array, pa.timestamp("us"))
    if types.is_timestamp(times.type):
        empty = np.flatnonzero(times.is_null().to_numpy(zero_copy_only=False)).tolist()
        return _Found(_microseconds(times), {**dict.fromkeys(empty, "is empty"), **bad})
    if types.is_temporal(kind) or types.is_nested(kind):
        raise pa.ArrowInvalid(f"no times are of this type, but text is as {FORM}")
    time_N, faults = _each_time(array)
    return _Found(time_N, {**faults, **bad})


def _hashes(array: Any) -> _Found:
    """Hash values to int64, equal for equal texts; missing values to 0."""
    kind = array.type.value_type if pa.types.is_dictionary(array.type) else array.type
    # Whole numbers are floats where pandas had missing ones among them.
    column = CategoricalColumn(
        name="group", kind="integer" if pa.types.is_floating(kind) else "string"
    )
    coded, bad = _coded(array, column, None)
    missing = missing_key(column)
    hash_D = np.array(
        [0 if key == missing else xxh3_64_intdigest(str(key).encode()) for key in coded.keys],
        np.uint64,
    )
    return _Found(hash_D.view(np.int64)[coded.index_M], bad)


def _arrow_times(array: Any) -> Any:
    """Cast text to times if Arrow can parse all of it; else leave it unchanged."""
    for unit in ("us", "ns"):  # nanoseconds end in 2262
        for zone in (None, "UTC"):
            try:
                return pc.cast(array, pa.timestamp(unit, zone))
            except pa.ArrowInvalid:
                continue
    return array


def _microseconds(times: Any) -> Int64s:
    """Microseconds since 1970, rounded down."""
    whole_N = pc.fill_null(pc.cast(times, pa.int64()), 0).to_numpy(zero_copy_only=False)
    if times.type.unit == "ns":
        return whole_N // 1000
    factor = {"s": 10**6, "ms": 10**3, "us": 1}[times.type.unit]
    most = (2**63 - 1) // factor  # millions of years: later than any border
    return np.clip(whole_N, -most, most) * factor


def _each_time(array: Any) -> tuple[Int64s, dict[int, str]]:
    """Parse times one by one, where Arrow cannot parse all of them."""
    time_N, faults = np.zeros(len(array), np.int64), dict[int, str]()
    for index, value in enumerate(array.to_pylist()):
        moment = None if is_missing(value) else instant(str(value))
        if moment is not None:
            time_N[index] = moment
        else:
            faults[index] = "is empty" if is_missing(value) else f"{shown(value)} is not {FORM}"
    return time_N, faults


def _categories(array: Any, column: CategoricalColumn, path: str, missing: Sequence[str]) -> _Found:
    if column.max_length == 1:
        if is_list(array.type):
            raise DataError(
                f"{path}: column {column.name!r}: holds lists; the schema needs max_length > 1"
            )
        return _coded(array, column, None)
    lists, bad = _listed(array, column, path, missing)
    flat, length_N, kept_M = lists
    if column.truncate == "error":
        for index in np.flatnonzero(length_N > column.max_length).tolist():
            bad.setdefault(index, f"{length_N[index]} values, max_length = {column.max_length}")
    if not kept_M.all():
        row_M = np.repeat(np.arange(len(length_N)), length_N)
        length_N = np.bincount(row_M[kept_M], minlength=len(length_N))
        flat = flat.filter(pa.array(kept_M))
    coded = _coded(flat, column, length_N.astype(np.int32))
    return _Found(coded.values, {**coded.bad, **bad})


class _Listed(NamedTuple):
    """The values of lists, row after row, the number of each row, and a mask of those to keep."""

    flat: Any
    length_N: npt.NDArray[Any]
    kept_M: Bools


def _listed(
    array: Any, column: CategoricalColumn, path: str, missing: Sequence[str]
) -> tuple[_Listed, dict[int, str]]:
    array, bad = _lists(plain(array), column, path)
    length_N = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
    flat = without(plain(array.flatten()), missing)
    kept_M = ~_is_empty(flat)
    if column.truncate != "error":
        kept_M &= _is_kept(length_N, column)
    return _Listed(flat, length_N, kept_M), bad


def _id_weights(
    array: Any, ids: Any, column: CategoricalColumn, path: str, missing: Sequence[str]
) -> _Found:
    """Parse the weights of the ids that are kept, float32 (M,) where no row is bad."""
    # Split, an empty text would be a list of one missing value.
    ids, array = (without(plain(values), [""]) for values in (ids, array))
    (_, length_N, kept_M), _ = _listed(ids, column, path, missing)
    weights = replace(column, name=column.weights or "")
    (flat, weights_N, _), bad = _listed(array, weights, path, missing)
    row_M, own_row_M = (np.repeat(np.arange(len(array)), count) for count in (length_N, weights_N))
    same_N = length_N == weights_N
    for index in np.flatnonzero(~same_N).tolist():
        reason = f"{weights_N[index]} weights for {length_N[index]} values of {column.name!r}"
        bad.setdefault(index, reason)
    flat = flat.filter(pa.array(same_N[own_row_M])).filter(pa.array(kept_M[same_N[row_M]]))
    row_M = row_M[same_N[row_M] & kept_M]
    weight_M, faults = _numbers(flat)
    with np.errstate(over="ignore"):
        narrow_M = weight_M.astype(np.float32)
    for place in np.flatnonzero(~np.isfinite(narrow_M)).tolist():
        value = flat[place].as_py()
        reason = "a weight is empty" if is_missing(value) else f"{shown(value)} is no finite weight"
        bad.setdefault(int(row_M[place]), faults.get(place, reason))
    return _Found(narrow_M, bad)


def _lists(
    array: Any, column: CategoricalColumn | DenseColumn, path: str
) -> tuple[Any, dict[int, str]]:
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), pa.list_(pa.binary())), {}
    if is_list(array.type):
        return array, {}
    if not is_text(array.type) or column.separator is None:
        raise DataError(
            f"{path}: column {column.name!r}: {array.type} is no list; the schema needs a "
            f"separator, or {'' if isinstance(column, DenseColumn) else 'max_'}length = 1"
        )
    array, bad = as_text(array)
    if column.separator != JSON:
        return pc.split_pattern(array, column.separator), bad
    texts = pc.dictionary_encode(array)
    lists: list[list[str]] = []
    faults: dict[int, str] = {}
    for place, text in enumerate(texts.dictionary.to_pylist()):
        try:
            lists.append(split_list(text, JSON))
        except ValueError as error:
            lists.append([])
            faults[place] = f"{shown(text)} {error}"
    place_N = pc.fill_null(texts.indices, -1).to_numpy(zero_copy_only=False)
    for index in np.flatnonzero(np.isin(place_N, list(faults))).tolist():
        bad.setdefault(index, faults[int(place_N[index])])
    return pa.array(lists, pa.list_(pa.string())).take(texts.indices), bad


def lists_of_numbers(
    array: Any, length: int, missing: Sequence[str] = ()
) -> tuple[Any, Mapping[int, str]]:
    """Numbers (N, length) of lists, NaN for missing ones; and faults of invalid lists, by index.

    Args:
        array: lists, or missing ones.
        missing: words for missing numbers.

    Raises:
        ArrowError: they are lists of something else.
    """
    array = plain(array)
    length_N = pc.fill_null(pc.list_value_length(array), -1).to_numpy(zero_copy_only=False)
    fits_N = length_N == length
    wrong = np.flatnonzero(~fits_N & (length_N >= 0)).tolist()
    bad = {at: f"{length_N[at]} numbers instead of {length}" for at in wrong}
    is_fine_M = pa.array(np.repeat(fits_N, np.maximum(length_N, 0)))
    numbers = _numbers(without(plain(array.flatten().filter(is_fine_M)), missing))
    at_N = np.flatnonzero(fits_N)
    x_NL = np.full((len(array), length), np.nan)
    x_NL[at_N] = numbers.values.reshape(-1, length)
    return x_NL, {**{int(at_N[at // length]): why for at, why in numbers.bad.items()}, **bad}


def coded_of(array: Any, column: CategoricalColumn) -> tuple[Coded, Mapping[int, str]]:
    """The categories of single values, and the fault of each invalid one by index."""
    return _coded(plain(array), column, None)


def _is_empty(flat: Any) -> Bools:
    empty = pc.is_null(flat, nan_is_null=True)
    if is_text(flat.type):
        empty = pc.or_(empty, pc.equal(pc.binary_length(flat), 0).fill_null(True))
    return empty.to_numpy(zero_copy_only=False)


def _is_kept(length_N: npt.NDArray[Any], column: CategoricalColumn) -> Bools:
    """Mask of the values of lists that `truncate` keeps."""
    end_N = np.cumsum(length_N)
    place_M = np.arange(int(length_N.sum()))
    if column.truncate == "last":
        return place_M >= np.repeat(end_N - column.max_length, length_N)
    return place_M < np.repeat(end_N - length_N + column.max_length, length_N)


def _coded(array: Any, column: CategoricalColumn, length_N: Any) -> _Found:
    """Dictionary-encode categories; the fault of a bad one goes to its row."""
    if not pa.types.is_dictionary(array.type):
        array = pc.dictionary_encode(array)
    # int32, as indices of 8 bits may have no value left for nulls.
    indices, distinct = pc.cast(array.indices, pa.int32()), plain(array.dictionary)
    if indices.null_count:
        indices = pc.fill_null(indices, len(distinct))
    values = [*category_values(distinct), None]
    keys, faults = keys_of(values, column)
    index_M = indices.to_numpy(zero_copy_only=False).astype(np.int32)
    bad: dict[int, str] = {}
    if faults:
        wrong = np.flatnonzero(np.isin(index_M, list(faults)))
        row_M = None if length_N is None else np.repeat(np.arange(len(length_N)), length_N)
        for at in wrong.tolist():
            bad.setdefault(at if row_M is None else int(row_M[at]), faults[int(index_M[at])])
    return _Found(Coded(index_M, keys, length_N), bad)


def as_text(array: Any) -> tuple[Any, dict[int, str]]:
    """Cast bytes to text; those that are not UTF-8 become null, with a reason by index."""
    try:
        return pc.cast(array, pa.string()), {}
    except pa.ArrowInvalid:
        bad: dict[int, str] = {}
        values: list[str | None] = []
        for index, value in enumerate(array.to_pylist()):
            try:
                values.append(None if value is None else value.decode())
            except UnicodeDecodeError:
                values.append(None)
                bad[index] = f"{shown(value)} {NOT_UTF8}"
        return pa.array(values, pa.string()), bad
