"""What the columns of a table are: label, dense and categorical ones, and which rows test a model.

A schema is a YAML file, which `schemas.reading` reads. The manifest of prepared rows holds the
schema they were made with.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field

from dlrm_hybrid.bounds import STRICT, Count, Seed

MOST_COLUMNS = 10_000
MOST_IDS = 1 << 16  # of one row in a multi-hot column
_SHOWN_NAMES = 8
ColumnName = Annotated[str, Field(min_length=1, max_length=1000)]
Integer = Annotated[int, Field(gt=-(2**63), lt=2**63)]
HashSize = Annotated[int, Field(ge=0, lt=2**31 - 1)]  # ids have 32 bits, and two rows are others'
Share = Annotated[float, Field(ge=0, lt=1)]
Border = int | float | str
Default = int | float | str
Extra = Literal["error", "ignore"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """A column of numbers.

    Attributes:
        name: of the column.
        transform: `log1p` takes log(x + 1), negative x as 0; `standardise` subtracts the mean of
            the training part and divides by its standard deviation; `none` keeps x.
        missing: taken instead of an empty value, before the transform.
        default: the value of rows to score that lack the column, "" a missing one; null refuses
            them.
    """

    __pydantic_config__: ClassVar = STRICT

    name: ColumnName
    transform: Literal["log1p", "standardise", "none"] = "none"
    missing: float = 0.0
    default: Default | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CategoricalColumn:
    """A column of categories, each with a row of an embedding table.

    Attributes:
        name: of the column.
        kind: `string`, `integer` (64 bits) or `hash8`: eight hexadecimal digits, as Criteo's.
        min_count: categories that the vocabulary's rows have fewer times share id 0; 0 and 1 keep
            all.
        bucket: of an integer column: `log_squared` takes ⌊ln(x)²⌋ for x > 2, others as they are.
        missing: an empty value is a category of its own (`own`), of those with id 0 (`shared`), or
            this whole number, before `bucket`.
        hash_size: categories are hashed into so many buckets, and each has a row of the table,
            whatever rows were there to see; 0 keeps categories as they are.
        default: the value of rows to score that lack the column, "" a missing one; null refuses
            them.
        max_length: most ids of one row; more than 1 makes the column multi-hot.
        truncate: of longer lists the `first` or `last` so many values count; with `error` they are
            bad rows.
        separator: between the categories of one row in text, for a multi-hot column; `json` for
            lists with brackets, as JSON and Python write them.
        expand_to: ids that a model gets for the one of a row: itself, and others that a hash draws
            from its table, for the same id always the same.
        embedding_dim: width of its table; only null, which takes the model's.
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
    separator: Annotated[str, Field(min_length=1, max_length=8)] | None = None
    expand_to: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    embedding_dim: Annotated[int, Field(ge=1, le=4096)] | None = None

    @property
    def has_texts(self) -> bool:
        """Whether its categories are texts, and not numbers."""
        return self.kind == "string" and not self.hash_size

    @property
    def has_hashes(self) -> bool:
        """Whether its categories are eight hexadecimal digits, which Criteo has hashed."""
        return self.kind == "hash8" and not self.hash_size

    @property
    def key_type(self) -> str:
        """How numpy has its categories where these are numbers."""
        return "<u4" if self.has_hashes else "<i8"

    @property
    def changes(self) -> tuple[str | int, ...]:
        """What becomes of values before they are categories, as far as it is not the usual."""
        bucket = () if self.bucket is None else (self.bucket,)
        truncate = () if self.truncate == "error" else (f"truncate {self.truncate}",)
        return (*bucket, *(() if self.missing == "own" else (self.missing,)), *truncate)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByFile:
    """Rows of files whose names fit a pattern are for validation or tests, all others to train."""

    __pydantic_config__: ClassVar = STRICT

    by: Literal["file"]
    validation: tuple[str, ...] = ()
    test: Annotated[tuple[str, ...], Field(min_length=1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ByFraction:
    """Each row's part is drawn by a hash of `seed` and its number, counted over all files."""

    __pydantic_config__: ClassVar = STRICT

    by: Literal["fraction"]
    validation: Share = 0.0
    test: Share
    seed: Seed = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ByTime:
    """Rows from `test_from` on test, those before it from `validation_from` on validate."""

    __pydantic_config__: ClassVar = STRICT

    by: Literal["time"]
    column: ColumnName
    validation_from: Border | None = None
    test_from: Border


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """How a row of text is divided into values.

    Attributes:
        delimiter: between values.
        quote: `double`: a value that begins with `"` ends at the next one; `none`: quotes are text.
        names: of the columns of a file without a header; empty where the first line has them.
    """

    delimiter: str = ","
    quote: Literal["double", "none"] = "double"
    names: tuple[str, ...] = ()


Split = Annotated[ByFile | ByFraction | ByTime, Field(discriminator="by")]
Categoricals = Annotated[
    tuple[CategoricalColumn, ...], Field(min_length=1, max_length=MOST_COLUMNS)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema:
    """Every column of a table, and which rows are for what.

    Attributes:
        format: `table` for columns with names; `criteo` for text of Criteo's challenges, without a
            header: label, 13 integers, 26 categories, in this order.
        label: column of 0 and 1.
        dense: columns of numbers, in the order of the model's input.
        categorical: columns of categories, in the order of the embedding tables.
        ignore: columns of the files that are not read, "" one without a name; any other one is an
            error.
        split: which rows train, validate and test; null with `criteo`, where `data.days` says it.
        vocabulary: rows whose categories get ids: those of the `train` part, or `all`; of other
            rows categories share id 0.
        delimiter: between the columns of CSV files, an ASCII character.
        quote: of CSV files: `double` takes delimiters and line ends between two `"` for text, as
            spreadsheets and pandas write them; `none` takes the quotes themselves for text.
        names: of all columns of CSV files without a header, in their order; empty where the first
            line of a file has them.
        missing_values: words that are missing values, in any column and in lists.
    """

    __pydantic_config__: ClassVar = STRICT

    format: Literal["table", "criteo"] = "table"
    label: ColumnName
    dense: Annotated[tuple[DenseColumn, ...], Field(max_length=MOST_COLUMNS)]
    categorical: Categoricals
    ignore: tuple[Annotated[str, Field(max_length=1000)], ...] = ()
    split: Split | None = None
    vocabulary: Literal["train", "all"] = "train"
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = ","
    quote: Literal["double", "none"] = "double"
    names: Annotated[tuple[ColumnName, ...], Field(max_length=MOST_COLUMNS)] = ()
    missing_values: tuple[Annotated[str, Field(min_length=1, max_length=1000)], ...] = ()

    @property
    def dialect(self) -> Dialect:
        """How its CSV files are divided."""
        return Dialect(delimiter=self.delimiter, quote=self.quote, names=self.names)

    @property
    def num_dense(self) -> int:
        """Width of the model's dense input."""
        return len(self.dense)

    @property
    def single(self) -> tuple[int, ...]:
        """Indices of the categorical columns with one id a row."""
        return tuple(i for i, one in enumerate(self.categorical) if one.max_length == 1)

    @property
    def multi_hot(self) -> tuple[int, ...]:
        """Indices of the categorical columns with a list of ids a row."""
        return tuple(i for i, one in enumerate(self.categorical) if one.max_length > 1)

    @property
    def expanded(self) -> dict[int, int]:
        """Ids that a row gets, by the index of each column that is expanded."""
        sizes = enumerate(one.expand_to for one in self.categorical)
        return {i: size for i, size in sizes if size > 1}

    @property
    def read_columns(self) -> tuple[str, ...]:
        """Names of all columns that are read from a file, the label first."""
        names = [self.label, *(one.name for one in (*self.dense, *self.categorical))]
        if isinstance(self.split, ByTime) and self.split.column not in names:
            names.append(self.split.column)
        return tuple(names)

    @property
    def for_scoring(self) -> Schema:
        """The schema of new rows, which are all for one purpose."""
        split = self.split
        unread = (*self.ignore, *([split.column] if isinstance(split, ByTime) else []))
        return replace(self, split=None, ignore=unread)

    @property
    def defaults(self) -> dict[str, Default]:
        """The values of columns that rows to score may lack."""
        columns = (*self.dense, *self.categorical)
        return {one.name: one.default for one in columns if one.default is not None}

    def columns_fault(
        self, names: Collection[str], extra: Extra, keep: Collection[str] = (), key: str = "extra"
    ) -> str | None:
        """Why rows with these columns are none to score; None if they are.

        Args:
            names: the columns of the rows.
            extra: whether columns that the schema does not name are an `error`.
            keep: more columns that the rows must have.
            key: what `extra` is called where a person sets it.
        """
        features = [one.name for one in (*self.dense, *self.categorical)]
        defaults = self.defaults
        required = [one for one in features if one not in defaults]
        missing = [one for one in dict.fromkeys((*required, *keep)) if one not in names]
        named = {self.label, *features, *self.ignore, *keep}
        foreign = [one for one in names if one not in named] if extra == "error" else []
        lacks = f"no column {some_names(missing)}" if missing else ""
        has = f"column {some_names(foreign)} is not in the schema ({key}=ignore leaves it)"
        return "; ".join(one for one in (lacks, has if foreign else "") if one) or None

    def differences(self, expected: Schema) -> list[str]:
        """Each value that is not as wanted, as `key: prepared with …, the schema says …`."""
        before, now = _flat(asdict(self)), _flat(asdict(expected))
        return [
            f"{key}: prepared with {before.get(key)!r}, the schema says {now.get(key)!r}"
            for key in dict.fromkeys((*before, *now))
            if before.get(key) != now.get(key)
        ]


def some_names(names: Sequence[str]) -> str:
    """Names for a message, the first of many."""
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(repr(name) for name in names[:_SHOWN_NAMES]) + more


def _flat(value: Any, key: str = "data.schema") -> dict[str, Any]:
    """Values of nested mappings and sequences by key: `data.schema.dense[0].name`."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {k: v for name, one in pairs for k, v in _flat(one, f"{key}.{name}").items()}
    if isinstance(value, (list, tuple)):
        items = enumerate(cast("list[Any]", value))
        return {k: v for i, one in items for k, v in _flat(one, f"{key}[{i}]").items()}
    return {key: value}
