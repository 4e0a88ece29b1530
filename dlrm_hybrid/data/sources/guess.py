"""Guesses a first schema for a file, with comments, to be edited by someone who knows the columns.

Each guess about a column is tried with the reader of `prepare` on the first block of the file, and
proposed only if it works.

Shapes: N rows of the first block, M ids of a column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from dlrm_hybrid.data.schema import (
    MOST_IDS,
    ByFraction,
    CategoricalColumn,
    DenseColumn,
    Dialect,
    Schema,
)
from dlrm_hybrid.data.schemas.reading import loads
from dlrm_hybrid.data.sources.arrow import ArrowError, is_list, is_text, pa, pc, plain
from dlrm_hybrid.data.sources.cells import (
    JSON,
    Key,
    instant,
    is_number,
    missing_key,
    split_list,
)
from dlrm_hybrid.data.sources.files import Block, TableSource, check_names, open_source
from dlrm_hybrid.data.sources.raw import BadRowPolicy
from dlrm_hybrid.data.sources.tables import parts
from dlrm_hybrid.data.sources.values import Coded, Values, read_values
from dlrm_hybrid.types import ConfigError, DataError, printable

KEY = "data.guess"
LABELS = ("label", "click", "clicked", "target", "y", "conversion", "is_click")
SEPARATORS = ("|", ";", " ")
DELIMITERS = (",", "\t", ";", "|")
FEW = 30  # up to this many distinct whole numbers are categories, not amounts
UNIQUE = 0.95  # with more distinct values per row they are no categories
SKEWED = 20.0  # above this ratio of largest to median, numbers get log1p
EXACT = 2.0**53  # whole numbers beyond it are ids, not amounts: float64 cannot hold all of them
BLOCK_BYTES = 1 << 23
_MADE = "column_{}"  # names for unnamed columns
SHOWN_CHARACTERS = 100
_ABSENT = 5e-324  # marks a missing number: no file holds this one
_BRACKETS = r"(?s)^\s*(\[.*\]|\(.*\))\s*$"
_FOREIGN = (
    (
        r"^[+-]?(\d{1,3}([. ]\d{3})+|\d+),\d+$",
        "numbers with decimal commas: write them with points",
    ),
    (
        r"^\d{1,2}[./-]\d{1,2}[./-](\d{2}|\d{4})([ T]\d{1,2}:\d{2}(:\d{2})?)?$",
        "dates that are not written as 2024-12-31",
    ),
    (r"(?s)^\s*\{.*\}\s*$", "objects of JSON or Python"),
)


@dataclass(frozen=True, slots=True)
class _Column:
    """What a column of a file seems to be.

    Attributes:
        summary: summary of its values, for a comment.
        use: column of the schema; None if it can only be ignored.
        is_label: whether it holds only 0 and 1, so may be the label instead.
        is_time: whether it may split the rows by time.
    """

    name: str
    summary: str
    use: DenseColumn | CategoricalColumn | None = None
    is_label: bool = False
    is_time: bool = False


class Guess(NamedTuple):
    """A schema that was guessed from the first rows of a file.

    Attributes:
        text: content of the schema file.
        remarks: lines for the user on what to change before use.
    """

    text: str
    remarks: tuple[str, ...]


def guess(path: Path, policy: BadRowPolicy) -> Guess:
    """Guess a schema from the first block of a file; DataError if it is no table with rows."""
    dialect, source = _open(path)
    check_names(path, source.names, (), set(source.names))
    if len(source.names) < 2:
        raise _no_table(path, f"one column {source.names[0]!r:.60}" if source.names else "nothing")
    blocks = source.blocks(source.names)
    block = next((block for block in blocks if len(block.row_N) or block.odd), None)
    next(blocks, None)  # raises if the text after these rows is damaged
    if block is None:
        raise DataError(f"{path}: no rows to guess a schema from ({KEY})")
    if len(block.odd) >= len(block.row_N):
        raise _no_table(path, f"row {block.odd[0].row} has {block.odd[0].reason}")
    for count, odd in enumerate(block.odd, 1):
        policy.check(count, f"{path}: row {odd.row}: {odd.reason}")
    columns = [_column(name, block) for name in source.names]
    if not any(column.use for column in columns):
        summary = "; ".join(f"{column.name!r}: {column.summary}" for column in columns)
        raise _no_table(path, f"no column that a model can use: {summary:.400}")
    return _written(path, dialect, columns, block)


def _no_table(path: Path, content: str) -> DataError:
    return DataError(f"{path}: not a table with a header that names its columns: {content} ({KEY})")


def _open(path: Path) -> tuple[Dialect, TableSource]:
    dialects = [Dialect(delimiter=delimiter) for delimiter in DELIMITERS]
    sources = [(dialect, _source(path, dialect)) for dialect in dialects]
    dialect, source = max(sources, key=lambda pair: len(pair[1].names))
    if source.is_text and len(source.names) > 1:
        names = tuple(_MADE.format(number) for number in range(1, len(source.names) + 1))
        without = replace(dialect, names=names)
        if _is_row(source.names, _source(path, without)):
            return without, _source(path, without)
    return dialect, source


def _source(path: Path, dialect: Dialect) -> TableSource:
    return open_source(path, dialect, BLOCK_BYTES, lambda piece: None, KEY)


def _is_row(cells: Sequence[str], source: TableSource) -> bool:
    """Whether the first line of a file is a row of values, not a header.

    It is if it has numbers or times in all columns where the rows have them. The numbers 0, 1, 2, …
    are a header: frames without column names are written so.
    """
    count = len(cells)
    if [*cells] in ([*map(str, range(count))], [*map(str, range(1, count + 1))]) and count > 2:
        return False
    if not any(map(_is_value, cells)):
        return False
    block = next(iter(source.blocks(source.names)), None)
    if block is None or len(block.row_N) < 2:
        return True
    rows = pa.array(block.row_N > 1)
    holds: list[bool] = []
    for cell, array in zip(cells, block.columns.columns, strict=True):
        values = array.filter(rows).drop_null().unique().to_pylist()
        if cell and values and all(_is_value(value.decode(errors="replace")) for value in values):
            holds.append(_is_value(cell))
    return all(holds) and any(holds)


def _is_value(text: str) -> bool:
    return is_number(text) or instant(text) is not None


def _written(path: Path, dialect: Dialect, columns: Sequence[_Column], block: Block) -> Guess:
    """The schema as text, validated by the reader of `prepare`."""
    labels = [column for column in columns if column.is_label]
    labels.sort(key=lambda column: column.name.lower() not in LABELS)
    features = [*labels[1:], *(column for column in columns if not column.is_label)]
    categorical = [column for column in features if isinstance(column.use, CategoricalColumn)]
    split = _split(path, block)
    lines = [
        f"# Guessed from the first {len(block.row_N):,} rows of {printable(path.name)}. Please "
        "check every line:",
        "# what a column means only you know. docs/table.md says what can be written here.",
        *_label(labels[0] if labels else None),
        *_uses("dense", [column for column in features if isinstance(column.use, DenseColumn)]),
        *_uses("categorical", categorical),
        *_unused([column for column in features if column.use is None]),
        f"split: {{by: fraction, validation: {split.validation}, test: {split.test}, "
        f"seed: {split.seed}}}",
    ]
    if dialect.delimiter != DELIMITERS[0]:
        lines.append(f"delimiter: {_scalar(dialect.delimiter)}")
    remarks: list[str] = []
    if dialect.names:
        lines.append("# The first line looks like values: name the columns, here and above.")
        lines.append(f"names: [{', '.join(map(_scalar, dialect.names))}]")
        remarks.append(
            f"the first line looks like values, so columns are called {_MADE.format(1)}, …"
        )
    text = "\n".join([*lines, ""])
    if not labels:
        remarks.append("no column holds nothing but 0 and 1: write the name of the label")
    if not categorical:
        remarks.append("no column looks like categories: at least one is needed")
    if labels and categorical:
        try:
            loads(text, str(path))
        except ConfigError as error:
            raise DataError(f"{error}\n{path}: no schema for it can be written ({KEY})") from error
    return Guess(text, tuple(remarks))


def _label(column: _Column | None) -> Iterator[str]:
    if column is None:
        yield "# No column holds nothing but 0 and 1: write the label's name here, or what of a"
        yield "# column makes it 1: {column: …, positive: [click, buy]} or {column: …, above: 3.5}."
        yield "label: null"
    else:
        yield f"label: {_scalar(column.name)}  # {_comment(column.summary)}"


def _uses(key: str, columns: Sequence[_Column]) -> Iterator[str]:
    need = "  # at least one is needed" if key == "categorical" else ""
    yield f"{key}:" if columns else f"{key}: []{need}"
    for column in columns:
        summary = f"{column.summary}; another label?" if column.is_label else column.summary
        yield f"  - {{{_settings(column.use)}}}  # {_comment(summary)}"


def _unused(columns: Sequence[_Column]) -> Iterator[str]:
    if columns:
        yield "ignore:"
    for column in columns:
        yield f"  - {_scalar(column.name)}  # {_comment(column.summary)}"
    for column in columns:
        if column.is_time:
            name = _scalar(column.name)
            yield f"# or, without it in `ignore`: {{by: time, column: {name}, test_from: …}}"


def _settings(use: Any) -> str:
    settings = ((field.name, getattr(use, field.name), field.default) for field in fields(use))
    return ", ".join(f"{key}: {_scalar(value)}" for key, value, usual in settings if value != usual)


def _comment(text: str) -> str:
    """A comment in one short printable line, whatever the names of types and values contain."""
    line = " ".join(printable(text).split())
    return f"{line[:SHOWN_CHARACTERS]}…" if len(line) > SHOWN_CHARACTERS else line


def _scalar(value: object) -> str:
    """A value in YAML, in one line; words of our own without quotes."""
    if not isinstance(value, str) or value in ("integer", "log1p", "standardise", JSON):
        return str(value)
    text = yaml.safe_dump(value, default_style='"', allow_unicode=True, width=math.inf)
    return text.removesuffix("\n")


def _split(path: Path, block: Block) -> ByFraction:
    values, _ = _read(block)
    for validation, test, least in ((0.1, 0.1, 3), (0.3, 0.3, 3), (0.0, 0.5, 2)):
        for seed in range(100):
            split = ByFraction(by="fraction", validation=validation, test=test, seed=seed)
            schema = Schema(label="", dense=(), categorical=(), split=split)
            if len(np.unique(parts(values, schema, path.name, 0))) == least:
                return split
    raise DataError(f"{path}: {len(block.row_N)} rows: too few to train and to test on ({KEY})")


class _Tried(NamedTuple):
    """Result of reading one column as categories.

    Attributes:
        use: the column of the schema; None if `prepare` refuses a value.
        fault: the first value that is refused.
    """

    use: CategoricalColumn | None
    coded: Coded
    fault: str

    @property
    def categories(self) -> list[Key]:
        """Distinct categories, sorted, without the key of missing values."""
        assert self.use is not None
        indices: list[int] = np.unique(self.coded.index_M).tolist()
        return sorted({self.coded.keys[index] for index in indices} - {missing_key(self.use)})


def _read(
    block: Block,
    dense: tuple[DenseColumn, ...] = (),
    categorical: tuple[CategoricalColumn, ...] = (),
) -> tuple[Values, str]:
    """Read columns like `prepare`: the values, and the fault of the first bad row."""
    schema = Schema(label="", dense=dense, categorical=categorical)
    values, bad = read_values(Block(block.columns, block.row_N, ()), schema, "", labels=False)
    return values, f"row {bad[0].row}: {bad[0].reason}" if bad else ""


def _try(block: Block, *uses: CategoricalColumn) -> _Tried:
    """Try columns of a schema until `prepare` accepts one; else the result of the last."""
    tried = None
    for use in uses:
        values, fault = _read(block, categorical=(use,))
        tried = _Tried(None if fault else use, values.categories[0], fault)
        if tried.use:
            break
    assert tried is not None
    return tried


def _column(name: str, block: Block) -> _Column:
    block = Block(block.columns.select([name]), block.row_N, ())
    array = block.columns.column(0)
    kind = str(array.type)
    try:
        array = plain(array)
        if array.null_count == len(array):
            return _Column(name, "empty in these rows")
        if not name:  # pandas writes its index so, and a schema can only ignore it
            return _Column(name, "has no name")
        if is_list(array.type):
            return _list(name, block, array)
        if pa.types.is_temporal(array.type):
            is_time = pa.types.is_date(array.type) or pa.types.is_timestamp(array.type)
            return _Column(name, f"{kind}{_missing(array.null_count, len(array))}", is_time=is_time)
        return _single(name, block, array)
    except (DataError, ArrowError):
        return _Column(name, f"{kind}: no type that is read")


def _missing(count: int, rows: int) -> str:
    return f", {count / rows:.0%} missing" if count else ""


def _single(name: str, block: Block, array: Any) -> _Column:
    values, fault = _read(block, dense=(DenseColumn(name=name, missing=_ABSENT),))
    if not fault:
        return _amounts(name, block, values.dense_NI[:, 0])
    return _words(name, block, array) if is_text(array.type) else _Column(name, fault)


def _amounts(name: str, block: Block, all_N: npt.NDArray[np.floating[Any]]) -> _Column:
    """Guess about a column of numbers: a label, categories, or dense values."""
    x_N = all_N[all_N != _ABSENT]
    if not len(x_N):
        return _Column(name, "empty in these rows")
    note = _missing(len(all_N) - len(x_N), len(all_N))
    values = np.unique(x_N)
    low, high = float(values[0]), float(values[-1])
    is_whole = bool((values == np.floor(values)).all())
    is_name = name.lower().endswith("id") or max(-low, high) > EXACT
    if is_whole and (len(values) <= FEW or is_name):
        integer = CategoricalColumn(name=name, kind="integer")
        tried = _try(block, integer, CategoricalColumn(name=name))
        if tried.use:
            categories = tried.categories
            ends = (
                (categories[0], categories[-1])
                if tried.use == integer
                else (f"{low:g}", f"{high:g}")
            )
            summary = f"{ends[0]} to {ends[1]}, {len(categories):,} distinct{note}"
            if is_name and len(categories) > UNIQUE * len(x_N):
                return _Column(name, f"{summary}: almost every row its own")
            is_label = not note and values.tolist() == [0.0, 1.0]
            summary = f"{x_N.mean():.2%} are 1" if is_label else summary
            return _Column(name, summary, tried.use, is_label=is_label)
    is_skewed = low >= 0 and high > SKEWED * max(float(np.median(x_N)), 1e-9)
    use = DenseColumn(name=name, transform="log1p" if is_skewed else "standardise")
    _, fault = _read(block, dense=(use,))
    summary = f"{low:g} to {high:g}, {len(values):,} distinct{note}"
    return _Column(name, fault) if fault else _Column(name, summary, use)


def _words(name: str, block: Block, array: Any) -> _Column:
    """Guess about a column of text other than numbers: times, lists or categories."""
    tried = _try(block, CategoricalColumn(name=name))
    if tried.use is None:
        return _Column(name, tried.fault)
    text = pc.cast(array, pa.string())
    text = text.filter(pc.not_equal(text, ""))
    distinct = pc.unique(text)
    note = _missing(len(array) - len(text), len(array))
    if all(instant(value) is not None for value in distinct.to_pylist()):
        return _Column(name, f"times{note}", is_time=True)
    for pattern, content in _FOREIGN:
        if pc.all(pc.match_substring_regex(distinct, pattern)).as_py():
            return _Column(name, f"{content}{note}")
    tries = (_vectors(name, block, _lengths(distinct, x), note, x) for x in (JSON, *SEPARATORS))
    if vectors := next(filter(None, tries), None):
        return vectors
    if pc.all(pc.match_substring_regex(distinct, _BRACKETS)).as_py():
        return _list(name, block, array, JSON)
    for separator in SEPARATORS:
        if _is_separator(separator, distinct):
            return _list(name, block, array, separator)
    if len(distinct) > UNIQUE * len(text) and len(text) > FEW:
        return _Column(name, f"text, almost every row its own{note}")
    return _Column(name, f"{len(distinct):,} distinct{note}", tried.use)


def _is_separator(separator: str, text: Any) -> bool:
    """Whether texts are probably lists: their lengths differ, and their words are repeated.

    The words of titles and addresses are not repeated; names and times all have the same length.
    """
    lists = pc.split_pattern(text, separator)
    length = pc.list_value_length(lists)
    words = pc.count_distinct(lists.flatten()).as_py()
    is_long = pc.mean(length).as_py() > 1.5 and pc.min(length) != pc.max(length)
    return is_long and words < len(text)


def _list(name: str, block: Block, array: Any, separator: str | None = None) -> _Column:
    """Guess about a column of lists, or of text that is taken for lists."""
    text = CategoricalColumn(name=name, max_length=MOST_IDS, separator=separator)
    is_number = separator is None and not is_text(plain(array.flatten()).type)
    tried = _try(block, *([replace(text, kind="integer")] if is_number else []), text)
    note = _missing(array.null_count, len(array))
    if tried.use is None and is_number:
        lengths = pc.unique(pc.list_value_length(array).drop_null()).to_pylist()
        vectors = _vectors(name, block, lengths, note)
        return vectors or _Column(name, f"{array.type}: {tried.fault}")
    if tried.use is None:
        return _Column(name, tried.fault)
    assert tried.coded.length_N is not None
    longest = int(tried.coded.length_N.max())
    if not longest:
        return _Column(name, "empty in these rows")
    summary = f"lists of up to {longest}, {len(tried.categories):,} distinct{note}"
    # Later rows may have longer lists.
    return _Column(name, summary, replace(tried.use, max_length=min(2 * max(2, longest), MOST_IDS)))


def _lengths(texts: Any, separator: str) -> Sequence[int]:
    """The different lengths of texts as lists; none if the first is no list of several numbers."""
    lengths: dict[int, None] = {}
    for text in texts.to_pylist():
        try:
            values = split_list(text, separator)
        except ValueError:
            return ()
        if not lengths and (len(values) < 2 or not all(map(is_number, values))):
            return ()
        lengths[len(values)] = None
    return [*lengths]


def _vectors(
    name: str, block: Block, lengths: Sequence[int], note: str, separator: str | None = None
) -> _Column | None:
    """Guess about lists that are no categories: vectors, if they are numbers and equally many.

    In text whole numbers may be categories, and are taken for them.
    """
    if len(lengths) != 1 or not 1 < lengths[0] <= MOST_IDS:
        return None
    use = DenseColumn(name=name, length=lengths[0], separator=separator)
    values, fault = _read(block, dense=(use,))
    x_NL = values.dense_NI
    if fault or (separator is not None and (x_NL == np.floor(x_NL)).all()):
        return None
    return _Column(name, f"lists of {lengths[0]} numbers{note}", use)
