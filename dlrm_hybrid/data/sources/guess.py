"""A first schema for a file, with comments, to be edited by a person who knows the columns.

Shapes: N rows of the first block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_hybrid.data.sources.arrow import ArrowInvalid, is_list, is_text, pa, pc
from dlrm_hybrid.data.sources.files import Source, open_source
from dlrm_hybrid.types import DataError

LABELS = ("label", "click", "clicked", "target", "y", "conversion", "is_click")
SEPARATORS = ("|", ";", " ")
DELIMITERS = (",", "\t", ";", "|")
FEW = 30  # distinct whole numbers: rather categories than amounts
UNIQUE = 0.95  # of the rows have a value of their own: no category
SKEWED = 20.0  # largest over median: rather the logarithm


@dataclass(frozen=True, slots=True)
class _Column:
    """What a column looks like.

    Attributes:
        name: of it.
        role: `label`, `dense`, `categorical`, `time` or `ignore`.
        settings: beside its name.
        seen: for a comment.
    """

    name: str
    role: str
    settings: str
    seen: str


def guess(path: Path) -> str:
    """The text of a schema, from the first block of a file.

    Raises:
        DataError: the file cannot be read, or has no rows.
    """
    delimiter, source = _open(path)
    block = next(iter(source.blocks(source.names)), None)
    if block is None or not block.columns.num_rows:
        raise DataError(f"{path}: no rows to guess a schema from (data.guess)")
    columns = [
        _column(name, array)
        for name, array in zip(source.names, block.columns.columns, strict=True)
    ]
    lines = [*_lines(path, columns, block.columns.num_rows)]
    if delimiter != DELIMITERS[0]:
        lines.append(f"delimiter: {_text(delimiter)}")
    return "\n".join([*lines, ""])


def _open(path: Path) -> tuple[str, Source]:
    """The file, as CSV by the first delimiter that divides its header into most columns."""
    sources = [
        (one, open_source(path, one, 1 << 23, lambda piece: None, "data.guess"))
        for one in DELIMITERS
    ]
    return max(sources, key=lambda pair: len(pair[1].names))


def _lines(path: Path, columns: list[_Column], rows: int) -> Iterator[str]:
    by_role = {
        role: [one for one in columns if one.role == role]
        for role in ("label", "dense", "categorical", "time", "ignore")
    }
    labels = sorted(by_role["label"], key=lambda one: one.name.lower() not in LABELS)
    others = [_as_category(one) for one in labels[1:]]
    categorical = [*by_role["categorical"], *others]
    yield f"# Guessed from the first {rows:,} rows of {path.name}. Please check every line:"
    yield "# what a column means only you know. docs/table.md says what can be written here."
    if labels:
        yield f"label: {_text(labels[0].name)}  # {labels[0].seen}"
    else:
        yield "# No column holds nothing but 0 and 1: write its name here."
        yield "label: null"
    yield "dense:" if by_role["dense"] else "dense: []"
    for one in by_role["dense"]:
        yield f"  - {{name: {_text(one.name)}{one.settings}}}  # {one.seen}"
    yield "categorical:" if categorical else "categorical: []  # at least one is needed"
    for one in categorical:
        yield f"  - {{name: {_text(one.name)}{one.settings}}}  # {one.seen}"
    unused = [*by_role["time"], *by_role["ignore"]]
    if unused:
        yield "ignore:"
        for one in unused:
            yield f"  - {_text(one.name)}  # {one.seen}"
    for one in by_role["time"]:
        yield f"# or, without it in `ignore`: {{by: time, column: {_text(one.name)}, test_from: …}}"
    yield "split: {by: fraction, validation: 0.1, test: 0.1, seed: 0}"


def _text(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _as_category(column: _Column) -> _Column:
    return _Column(column.name, "categorical", ", kind: integer", f"{column.seen}; another label?")


def _column(name: str, array: Any) -> _Column:
    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    missing = array.null_count / len(array)
    note = f", {missing:.0%} missing" if missing else ""
    if is_list(kind):
        return _lists(name, pc.list_value_length(array), array.flatten(), "", note)
    if pa.types.is_temporal(kind):
        return _Column(name, "time", "", f"{kind}{note}")
    if is_text(kind):
        try:
            array = pc.cast(array, pa.string())
        except ArrowInvalid:
            return _Column(name, "ignore", "", "not UTF-8")
        array = _read(array)
    array = array.drop_null()
    if not len(array):
        return _Column(name, "ignore", "", "empty in these rows")
    if pa.types.is_temporal(array.type):
        return _Column(name, "time", "", f"times{note}")
    if pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
        return _words(name, array, note)
    return _amounts(name, np.asarray(pc.cast(array, pa.float64(), safe=False)), note)


def _read(array: Any) -> Any:
    """Text as what all of it can be read as: numbers or times."""
    for kind in (pa.float64(), pa.timestamp("us")):
        try:
            return pc.cast(array, kind)
        except ArrowInvalid:
            continue
    return array


def _amounts(name: str, x_N: Any, note: str) -> _Column:
    x_N = x_N[np.isfinite(x_N)]
    values = np.unique(x_N)
    if not len(values):
        return _Column(name, "ignore", "", "empty in these rows")
    seen = f"{values[0]:g} to {values[-1]:g}, {len(values):,} distinct{note}"
    if not note and set(values.tolist()) == {0.0, 1.0}:
        return _Column(name, "label", "", f"{x_N.mean():.2%} are 1")
    is_whole = bool((values == np.floor(values)).all())
    is_name = name.lower().endswith("id") or not name  # pandas writes its index without a name
    if is_whole and is_name and len(values) > UNIQUE * len(x_N):
        return _Column(name, "ignore", "", f"{seen}: almost every row its own")
    if is_whole and (len(values) <= FEW or is_name):
        return _Column(name, "categorical", ", kind: integer", seen)
    is_skewed = values[0] >= 0 and values[-1] > SKEWED * max(float(np.median(x_N)), 1e-9)
    return _Column(name, "dense", f", transform: {'log1p' if is_skewed else 'standardise'}", seen)


def _words(name: str, array: Any, note: str) -> _Column:
    for separator in SEPARATORS:
        parts = pc.split_pattern(array, separator)
        length = pc.list_value_length(parts)
        words = pc.count_distinct(parts.flatten()).as_py()
        # Lists say the same words again and again; titles and addresses do not.
        if pc.mean(length).as_py() > 1.5 and words < pc.count_distinct(array).as_py():
            return _lists(name, length, parts.flatten(), f", separator: {_text(separator)}", note)
    distinct = pc.count_distinct(array).as_py()
    if distinct > UNIQUE * len(array) and len(array) > FEW:
        return _Column(name, "ignore", "", "text, almost every row its own")
    return _Column(name, "categorical", "", f"{distinct:,} distinct{note}")


def _lists(name: str, length: Any, flat: Any, settings: str, note: str) -> _Column:
    longest = max(2, pc.max(length).as_py() or 0)
    seen = f"lists of up to {longest}, {pc.count_distinct(flat).as_py():,} distinct{note}"
    kind = ", kind: integer" if pa.types.is_integer(flat.type) else ""
    # Other rows may have longer ones.
    return _Column(name, "categorical", f"{kind}, max_length: {2 * longest}{settings}", seen)
