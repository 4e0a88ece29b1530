"""Schema of a table: its labels, dense and categorical columns, and the split of its rows.

A schema is a YAML file, which `schemas.reading` reads. The manifest of prepared rows contains the
schema they were made with.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal, TypeVar, cast

from pydantic import Discriminator, Field, Tag, TypeAdapter

from dlrm_hybrid.bounds import STRICT, Count, Extra, Seed

MOST_COLUMNS = 10_000
MOST_IDS = 1 << 16  # of one row of a multi-hot column
_SHOWN_NAMES = 8
_MEANING = re.compile(
    r"data\.schema\.(missing_values\[|dense\[\d+\]\.(name|transform|missing|length):"
    r"|categorical\[\d+\]\.(name|kind|bucket|missing|hash_size|truncate|expand_to"
    r"|pooling|weights|table):)"
)
ColumnName = Annotated[str, Field(min_length=1, max_length=1000)]
Integer = Annotated[int, Field(gt=-(2**63), lt=2**63)]
HashSize = Annotated[int, Field(ge=0, lt=2**31 - 1)]  # int32 ids, two of them not for buckets
Share = Annotated[float, Field(ge=0, lt=1)]
Border = int | float | str
Default = int | float | str
Separator = Annotated[str, Field(min_length=1, max_length=8)]
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """A column of numbers, one input of the bottom MLP, or of vectors, an input for each number.

    Attributes:
        name: name of the column.
        transform: `log1p` takes log(x + 1), negative x as 0; `standardise` subtracts the mean of
            the training part and divides by its standard deviation; `none` keeps x.
        missing: replaces an empty value, before the transform.
        default: value of rows to score that lack the column, "" for a missing one; null refuses
            such rows.
        length: number of numbers in each list of the column; 1 for numbers without lists.
        separator: separates the numbers of a list in text, as in a multi-hot column.
    """

    __pydantic_config__: ClassVar = STRICT

    name: ColumnName
    transform: Literal["log1p", "standardise", "none"] = "none"
    missing: float = 0.0
    default: Default | None = None
    # Not part of `repr`, after which folders of prepared rows are named.
    length: Annotated[int, Field(ge=1, le=MOST_IDS)] = field(default=1, repr=False)
    separator: Separator | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalColumn:
    """A column of categories, each with a row of an embedding table.

    Attributes:
        name: name of the column.
        kind: `string`, `integer` (64 bits) or `hash8`: eight hexadecimal digits, as Criteo's.
        min_count: categories seen fewer times than this in the vocabulary's rows share id 0; 0 and
            1 keep all.
        bucket: for an integer column `log_squared` takes ⌊ln(x)²⌋ of x > 2 and keeps x ≤ 2.
        missing: an empty value is a category of its own (`own`), shares id 0 (`shared`), or is
            this whole number, before `bucket`.
        max_rows: most rows of its table, with that of id 0; the most frequent categories have them,
            and others share id 0. Null for any number.
        evict: whose row a new category takes where the table of an earlier day is full: that of
            the category seen least often on all days (`rarest`), or longest ago (`least_recent`).
            Null for nobody's.
        hash_size: number of buckets that categories are hashed into, each with a row of the table
            even if no category was seen in it; 0 keeps categories as they are.
        default: value of rows to score that lack the column, "" for a missing one; null refuses
            such rows.
        max_length: most ids of one row; more than 1 makes the column multi-hot.
        truncate: a longer list keeps its `first` or `last` `max_length` values; with `error` its
            row is bad.
        separator: separates the categories of one row in text, for a multi-hot column; `json` for
            lists with brackets, as JSON and Python write them.
        expand_to: bag size that the one id of a row is expanded to, with ids that a hash draws
            from its table, always the same for the same id.
        embedding_dim: width of its table; null takes the model's.
        pooling: rows of a list's ids are added (`sum`), or averaged (`mean`); an empty list is 0.
        vectors: file with a vector for each of some categories, whose rows begin with these.
        trainable: whether the rows of its table learn; else they stay as they begin.
        weights: column of lists of numbers, one for each id, that rows are multiplied by before
            they are added; null for 1 each.
        table: name of a table, with its vocabulary, that it shares with all columns that name it;
            null for one of its own.
    """

    __pydantic_config__: ClassVar = STRICT

    name: ColumnName
    kind: Literal["string", "integer", "hash8"] = "string"
    min_count: Count = 0
    bucket: Literal["log_squared"] | None = None
    missing: Literal["own", "shared"] | Integer = "own"
    hash_size: HashSize = 0
    default: Default | None = None
    max_length: Annotated[int, Field(ge=1, le=MOST_IDS)] = 1
    truncate: Literal["first", "last", "error"] = "error"
    separator: Separator | None = None
    expand_to: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    embedding_dim: Annotated[int, Field(ge=1, le=4096)] | None = None
    # Not part of `repr`, as above.
    max_rows: Annotated[int, Field(ge=1, lt=2**31)] | None = field(default=None, repr=False)
    evict: Literal["rarest", "least_recent"] | None = field(default=None, repr=False)
    pooling: Literal["sum", "mean"] = field(default="sum", repr=False)
    vectors: Annotated[str, Field(min_length=1, max_length=4096)] | None = field(
        default=None, repr=False
    )
    trainable: bool = field(default=True, repr=False)
    weights: ColumnName | None = field(default=None, repr=False)
    table: ColumnName | None = field(default=None, repr=False)

    @property
    def has_texts(self) -> bool:
        """Whether the categories are texts, not numbers."""
        return self.kind == "string" and not self.hash_size

    @property
    def has_hashes(self) -> bool:
        """Whether the categories are Criteo's hashes of eight hexadecimal digits."""
        return self.kind == "hash8" and not self.hash_size

    @property
    def key_type(self) -> str:
        """numpy's type of the categories if they are numbers."""
        return "<u4" if self.has_hashes else "<i8"

    @property
    def changes(self) -> tuple[str | int, ...]:
        """Settings other than the defaults that change values before they are categories."""
        bucket = () if self.bucket is None else (self.bucket,)
        truncate = () if self.truncate == "error" else (f"truncate {self.truncate}",)
        return (*bucket, *(() if self.missing == "own" else (self.missing,)), *truncate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByFile:
    """Split by file: names that match a pattern are for validation or test, others to train."""

    __pydantic_config__: ClassVar = STRICT

    by: Literal["file"]
    validation: tuple[str, ...] = ()
    test: Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByFraction:
    """Random split: a hash of `seed` and the row's number over all files draws its part.

    With a `column`, a hash of its value in place of the number does, so that rows of the same user
    are in the same part.
    """

    __pydantic_config__: ClassVar = STRICT

    by: Literal["fraction"]
    validation: Share = 0.0
    test: Share
    seed: Seed = 0
    column: ColumnName | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTime:
    """Split by time: rows from `test_from` on are for test, from `validation_from` validation."""

    __pydantic_config__: ClassVar = STRICT

    by: Literal["time"]
    column: ColumnName
    validation_from: Border | None = None
    test_from: Border


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """Dialect of CSV, by which a row is divided into values.

    Attributes:
        delimiter: separates values.
        quote: `double`: a value that begins with `"` ends at the next one; `none`: quotes are text.
        names: column names of a file without a header; empty if the first line has them.
    """

    delimiter: str = ","
    quote: Literal["double", "none"] = "double"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """A label that is made of a column: 1 for some of its values, 0 for all others.

    Attributes:
        column: name of the column.
        positive: texts or whole numbers that are 1; None without.
        above: numbers greater than this are 1; None without.
        name: name of one of several labels; null for the name of its column.
        loss_weight: factor of the loss of one of several labels in their sum.
    """

    __pydantic_config__: ClassVar = STRICT

    column: ColumnName
    positive: Annotated[tuple[str | int, ...], Field(min_length=1)] | None = None
    above: Annotated[float, Field(allow_inf_nan=False)] | None = None
    # Not part of `repr`, as above.
    name: ColumnName | None = field(default=None, repr=False)
    loss_weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = field(default=1.0, repr=False)


def _kind(label: object) -> str:
    return "text" if isinstance(label, str) else "mapping"


def _form(label: object) -> str:
    return "list" if isinstance(label, list | tuple) else _kind(label)


OneLabel = Annotated[ColumnName, Tag("text")] | Annotated[Label, Tag("mapping")]
SeveralLabels = Annotated[
    tuple[Annotated[OneLabel, Discriminator(_kind)], ...],
    Field(max_length=MOST_COLUMNS),
    Tag("list"),
]
LabelColumns = Annotated[OneLabel | SeveralLabels, Discriminator(_form)]
Split = Annotated[ByFile | ByFraction | ByTime, Field(discriminator="by")]
Categoricals = Annotated[
    tuple[CategoricalColumn, ...], Field(min_length=1, max_length=MOST_COLUMNS)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """The columns of a table, and the split of its rows.

    Attributes:
        format: `table` for columns with names; `criteo` for text of Criteo's challenges, without a
            header: label, 13 integers, 26 categories, in this order.
        label: column of 0 and 1, or how a column becomes that; or a list of several labels, each of
            which has a logit.
        weight: column of numbers ≥ 0: how much each row counts in losses and scores; null for 1
            each.
        group: column whose values group the rows, as users do, for GAUC; null for none.
        dense: columns of numbers, in the order of the model's input.
        categorical: columns of categories, in the order of the embedding tables.
        ignore: columns that are not read, "" for one without a name; unknown columns are an error.
        split: which rows train, validate and test; null with `criteo`, where `data.days` decides,
            and where all rows are scored, then learned.
        vocabulary: rows whose categories get ids: rows of the `train` part, or `all`; categories
            found only in other rows share id 0.
        delimiter: separates the columns of CSV files, an ASCII character.
        quote: of CSV files: `double` takes delimiters and line ends between two `"` for text, as
            spreadsheets and pandas write them; `none` takes the quotes themselves for text.
        names: all columns of CSV files without a header, in order; empty if the first line of a
            file has them.
        missing_values: words that mean a missing value, in any column and in lists.
    """

    __pydantic_config__: ClassVar = STRICT

    format: Literal["table", "criteo"] = "table"
    label: LabelColumns
    dense: Annotated[tuple[DenseColumn, ...], Field(max_length=MOST_COLUMNS)]
    categorical: Categoricals
    ignore: tuple[Annotated[str, Field(max_length=1000)], ...] = ()
    split: Split | None = None
    vocabulary: Literal["train", "all"] = "train"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    quote: Literal["double", "none"] = "double"
    names: Annotated[tuple[ColumnName, ...], Field(max_length=MOST_COLUMNS)] = ()
    missing_values: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = ()
    # Not part of `repr`, as above.
    weight: ColumnName | None = field(default=None, repr=False)
    group: ColumnName | None = field(default=None, repr=False)

    @property
    def beside_repr(self) -> list[Any]:
        """Values of the keys that are not part of `repr`, by place; empty if none is set."""
        set_apart = (
            (column.max_rows, column.evict, column.vectors, not column.trainable, column.table)
            for column in self.categorical
        )
        by_column = zip(*set_apart, strict=True)
        limits = [value for values in by_column if any(values) for value in values]
        drawn_by = self.split.column if isinstance(self.split, ByFraction) else None
        pooled = [f"{i}: mean" for i in self.averaged]
        pooled += [f"{i}: {self.categorical[i].weights}" for i in self.weighted]
        lists = [(column.length, column.separator) for column in self.dense if column.length > 1]
        settings = [*limits, self.weight, self.group, drawn_by, *pooled, *lists]
        several = [*self.loss_weights.items()]
        return [*settings, *several] if several or any(settings) else []

    @property
    def labels(self) -> tuple[Label, ...]:
        """The labels; most tables have one."""
        labels = self.label if isinstance(self.label, tuple) else (self.label,)
        return tuple(Label(column=label) if isinstance(label, str) else label for label in labels)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """Names of the columns that labels are read from."""
        return tuple(dict.fromkeys(label.column for label in self.labels))

    @property
    def loss_weights(self) -> dict[str, float]:
        """Factor of the loss of each of several labels, by name; empty for one label."""
        labels = self.labels
        return {item.name or item.column: item.loss_weight for item in labels if len(labels) > 1}

    @property
    def dialect(self) -> Dialect:
        """Dialect of the CSV files."""
        return Dialect(delimiter=self.delimiter, quote=self.quote, names=self.names)

    @property
    def num_dense(self) -> int:
        """Width of the model's dense input."""
        return sum(column.length for column in self.dense)

    @property
    def inputs(self) -> tuple[DenseColumn, ...]:
        """The dense columns, with a column for each number of vectors: `image[0]` …"""
        return tuple(
            dense if dense.length == 1 else replace(dense, name=f"{dense.name}[{at}]", length=1)
            for dense in self.dense
            for at in range(dense.length)
        )

    @property
    def single(self) -> tuple[int, ...]:
        """Indices of the categorical columns with one id per row."""
        return tuple(i for i, column in enumerate(self.categorical) if column.max_length == 1)

    @property
    def multi_hot(self) -> tuple[int, ...]:
        """Indices of the categorical columns with a list of ids per row."""
        return tuple(i for i, column in enumerate(self.categorical) if column.max_length > 1)

    @property
    def averaged(self) -> tuple[int, ...]:
        """Indices of the categorical columns whose lists are averaged."""
        return tuple(i for i, column in enumerate(self.categorical) if column.pooling == "mean")

    @property
    def weighted(self) -> tuple[int, ...]:
        """Indices of the categorical columns whose ids have weights."""
        return tuple(i for i, column in enumerate(self.categorical) if column.weights is not None)

    @property
    def features(self) -> tuple[str, ...]:
        """Names of the columns that a model's inputs are made of."""
        weights = (self.categorical[i].weights or "" for i in self.weighted)
        return (*(column.name for column in (*self.dense, *self.categorical)), *weights)

    @property
    def expanded(self) -> dict[int, int]:
        """Bag size by index of each categorical column that is expanded."""
        sizes = enumerate(column.expand_to for column in self.categorical)
        return {i: size for i, size in sizes if size > 1}

    @property
    def frozen(self) -> tuple[bool, ...]:
        """Whether the rows of each table never change; empty if all learn."""
        frozen = self.by_table([not column.trainable for column in self.categorical])
        return frozen if any(frozen) else ()

    @property
    def first_columns(self) -> tuple[int, ...]:
        """Index, for each categorical column, of the first one that has the same table."""
        indices: dict[str, int] = {}
        names = enumerate(column.table for column in self.categorical)
        return tuple(i if name is None else indices.setdefault(name, i) for i, name in names)

    @property
    def table_of_column(self) -> tuple[int, ...]:
        """Index of the table of each categorical column; empty if none share a table."""
        firsts = self.first_columns
        numbers = {first: table for table, first in enumerate(dict.fromkeys(firsts))}
        return tuple(numbers[first] for first in firsts) if len(numbers) < len(firsts) else ()

    @property
    def table_names(self) -> tuple[str, ...]:
        """Name of each table: the name that columns share, or the name of its column."""
        return self.by_table([column.table or column.name for column in self.categorical])

    def by_table(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """Choose from values by categorical column the value of each table's first column."""
        return tuple(values[column] for column in dict.fromkeys(self.first_columns))

    @property
    def read_columns(self) -> tuple[str, ...]:
        """Names of all columns that are read from a file, the labels first."""
        return tuple(dict.fromkeys((*self.label_columns, *self.features, *self._only_prepared)))

    @property
    def _only_prepared(self) -> tuple[str, ...]:
        """Columns besides the labels that rows to score need not have."""
        return tuple(
            name for name in (self.weight, self.group, self._split_column) if name is not None
        )

    @property
    def _split_column(self) -> str | None:
        return None if isinstance(self.split, ByFile | None) else self.split.column

    @property
    def without_split(self) -> Schema:
        """The schema of rows all of which are scored, then learned."""
        column = self._split_column
        ignore = self.ignore if column is None else (*self.ignore, column)
        return replace(self, split=None, ignore=ignore)

    @property
    def is_progressive(self) -> bool:
        """Whether all rows are scored before they are learned, as no split tells them apart."""
        return self.format == "table" and self.split is None

    @property
    def for_scoring(self) -> Schema:
        """The schema of rows to score, which have neither split, weights nor groups."""
        unread = (*self.ignore, *self._only_prepared)
        return replace(self, split=None, weight=None, group=None, ignore=unread)

    @property
    def defaults(self) -> dict[str, Default]:
        """Default values of the columns that rows to score may lack."""
        columns = (*self.dense, *self.categorical)
        return {column.name: column.default for column in columns if column.default is not None}

    def columns_fault(
        self, names: Collection[str], extra: Extra, keep: Collection[str] = (), key: str = "extra"
    ) -> str | None:
        """The reason why rows with these columns cannot be scored; None if they can.

        Args:
            names: the columns of the rows.
            extra: whether columns that the schema does not name are an `error`.
            keep: more columns that the rows must have.
            key: the option that sets `extra`, for the message.
        """
        features, defaults = self.features, self.defaults
        required = [name for name in features if name not in defaults]
        missing = [name for name in dict.fromkeys((*required, *keep)) if name not in names]
        schema_names = {*self.label_columns, *features, *self.ignore, *keep}
        foreign = [name for name in names if name not in schema_names] if extra == "error" else []
        lacks = f"no column {some_names(missing)}" if missing else ""
        has = f"column {some_names(foreign)} is not in the schema ({key}=ignore leaves it)"
        return "; ".join(fault for fault in (lacks, has if foreign else "") if fault) or None

    def differences(self, expected: Schema) -> list[str]:
        """The values that differ, as lines `key: prepared with …, the schema says …`."""
        before, now = _flat(asdict(self)), _flat(asdict(expected))
        return [
            f"{key}: prepared with {before.get(key)!r}, the schema says {now.get(key)!r}"
            for key in dict.fromkeys((*before, *now))
            if before.get(key) != now.get(key)
        ]

    def other_meaning(self, other: Schema) -> list[str]:
        """The `differences` that give values another meaning, so that no model has both schemas.

        Keys that say where rows come from, what they are for and which categories get ids are
        left out.
        """
        lines = [line for line in self.differences(other) if _MEANING.match(line)]
        if [*self.loss_weights] != [*other.loss_weights]:
            names, other_names = (
                ", ".join(label.name or label.column for label in of.labels) for of in (self, other)
            )
            lines.append(f"data.schema.label: prepared with {names}, the schema says {other_names}")
        return lines


def some_names(names: Sequence[str]) -> str:
    """Names for a message, shortened to the first if there are many."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(repr(name) for name in names[:_SHOWN_NAMES]) + more


def _flat(value: Any, key: str = "data.schema") -> dict[str, Any]:
    """Flatten nested mappings and sequences to keys such as `data.schema.dense[0].name`."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {k: v for name, item in pairs for k, v in _flat(item, f"{key}.{name}").items()}
    if isinstance(value, (list, tuple)):
        items = enumerate(cast("list[Any]", value))
        return {k: v for i, item in items for k, v in _flat(item, f"{key}[{i}]").items()}
    return {key: value}


@functools.cache
def adapter() -> TypeAdapter[Schema]:
    """Reads schemas; takes longer to make than to use."""
    return TypeAdapter(Schema)
