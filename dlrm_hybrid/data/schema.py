"""What the columns of a table are: label, dense and categorical ones, and which rows test a model.

A schema is a YAML file. `read` validates all of it; `builtin` gives those that come with the
package. The manifest of prepared rows holds the schema they were made with.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast

import yaml
from pydantic import Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails
from yaml import MarkedYAMLError, YAMLError
from yaml.nodes import MappingNode, Node

from dlrm_hybrid.bounds import STRICT, Count, Seed
from dlrm_hybrid.types import ConfigError, DataError

MOST_BYTES = 1 << 24
MOST_COLUMNS = 10_000
SHOWN_CHARACTERS = 60
FOLDER = "schemas"
ColumnName = Annotated[str, Field(min_length=1, max_length=1000)]
Integer = Annotated[int, Field(gt=-(2**63), lt=2**63)]
HashSize = Annotated[int, Field(ge=0, lt=2**32)]
Share = Annotated[float, Field(ge=0, lt=1)]
Border = int | float | str


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseColumn:
    """A column of numbers.

    Attributes:
        name: of the column.
        transform: `log1p` takes log(x + 1), negative x as 0; `standardise` subtracts the mean of
            the training part and divides by its standard deviation; `none` keeps x.
        missing: taken instead of an empty value, before the transform.
    """

    __pydantic_config__: ClassVar = STRICT

    name: ColumnName
    transform: Literal["log1p", "standardise", "none"] = "none"
    missing: float = 0.0


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
        hash_size: categories are hashed into so many before the vocabulary; 0 keeps them.
        max_length: most ids of one row; more than 1 makes the column multi-hot.
        separator: between the categories of one row in text, for a multi-hot column.
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
    max_length: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    separator: Annotated[str, Field(min_length=1, max_length=8)] | None = None
    expand_to: Annotated[int, Field(ge=1, le=1 << 16)] = 1
    embedding_dim: Annotated[int, Field(ge=1, le=4096)] | None = None

    @property
    def changes(self) -> tuple[str | int, ...]:
        """What becomes of values before they are categories, as far as it is not the usual."""
        bucket = () if self.bucket is None else (self.bucket,)
        return (*bucket, *(() if self.missing == "own" else (self.missing,)))


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

    def differences(self, wanted: Schema) -> list[str]:
        """Each value that is not as wanted, as `key: prepared with …, the schema says …`."""
        before, now = _flat(asdict(self)), _flat(asdict(wanted))
        return [
            f"{key}: prepared with {before.get(key)!r}, the schema says {now.get(key)!r}"
            for key in dict.fromkeys((*before, *now))
            if before.get(key) != now.get(key)
        ]


def named(name: str) -> Schema:
    """A schema by `data.schema`: a name of one that comes with the package, or a file.

    Raises:
        ConfigError: see `read`; or it is of Criteo's text, which other choices of `data` read.
    """
    if name not in _builtins():
        return read(Path(name))
    found = builtin(name)
    if found.format == "criteo":
        raise ConfigError(f"data.schema = {name!r}: is of data={name}, not of data=table")
    return found


def read(path: Path) -> Schema:
    """Read a schema file.

    Raises:
        ConfigError: it cannot be read, or has faults; one line for each, with file, key and value.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: more than {MOST_BYTES} bytes: no schema (data.schema)")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason} (data.schema)") from error
    return loads(text, str(path))


@functools.cache
def builtin(name: str) -> Schema:
    """A schema that comes with the package.

    Raises:
        DataError: there is none of this name; the message lists those there are.
    """
    if name not in _builtins():
        raise DataError(f"{name!r} is not one of: {', '.join(_builtins())}")
    file = resources.files("dlrm_hybrid.data") / FOLDER / f"{name}.yaml"
    return loads(file.read_text(encoding="utf-8"), f"{name}.yaml")


@functools.cache
def _builtins() -> tuple[str, ...]:
    files = (resources.files("dlrm_hybrid.data") / FOLDER).iterdir()
    return tuple(sorted(file.name.removesuffix(".yaml") for file in files))


def loads(text: str, name: str) -> Schema:
    """Read a schema from YAML; `name` is for messages.

    Raises:
        ConfigError: it has faults, one line for each.
    """
    try:
        values: Any = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}{_yaml_fault(error)} (data.schema)") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: a schema is a mapping of label, dense, … (data.schema)")
    try:
        # By way of JSON: there a list is a tuple in strict mode too.
        schema = TypeAdapter(Schema).validate_json(json.dumps(values, default=str))
    except ValidationError as error:
        faults = [_fault(one) for one in error.errors(include_url=False)]
    else:
        faults = list(_faults(schema))
        if not faults:
            return schema
    raise ConfigError("\n".join(f"{name}: {fault}" for fault in dict.fromkeys(faults)))


class _Loader(yaml.SafeLoader):
    """YAML without aliases, whose text can grow beyond all bounds, and without doubled keys."""

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        if self.check_event(yaml.AliasEvent):
            mark = cast(yaml.AliasEvent, self.peek_event()).start_mark
            raise MarkedYAMLError(problem="aliases (*) are not allowed", problem_mark=mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, count in Counter(str(key) for key in keys).items():
            if count > 1:
                raise MarkedYAMLError(problem=f"{key!r} twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


def _yaml_fault(error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
    reason = error.problem if isinstance(error, MarkedYAMLError) else str(error)
    return f"{where}: not YAML: {reason}"


def _fault(error: ErrorDetails) -> str:
    """A fault that pydantic has found: `categorical[2].min_count = -3: must be …`."""
    tags = ("file", "fraction", "time")
    path = [one for i, one in enumerate(error["loc"]) if not (one in tags and i == 1)]
    key = ""
    for one in path:
        # What of a union was tried.
        if one in ("int", "float", "str") or not str(one).replace("_", "").isalnum():
            continue
        key += f"[{one}]" if isinstance(one, int) else f".{one}" if key else str(one)
    kind = error["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{key}: unknown key"
    if kind in ("missing", "missing_argument", "union_tag_not_found"):
        return f"{key}{'.by' if kind == 'union_tag_not_found' else ''}: missing"
    value = repr(error["input"])
    shown = value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}…"
    return f"{key} = {shown}: {error['msg'].replace('Input should', 'must', 1)}"


def _faults(schema: Schema) -> Iterator[str]:
    """What is right alone, and wrong together."""
    named = [
        ("label", schema.label),
        *((f"dense[{i}].name", one.name) for i, one in enumerate(schema.dense)),
        *((f"categorical[{i}].name", one.name) for i, one in enumerate(schema.categorical)),
        *((f"ignore[{i}]", name) for i, name in enumerate(schema.ignore)),
    ]
    first: dict[str, str] = {}
    for key, name in named:
        if name in first:
            yield f"{key} = {name!r}: is {first[name]} too"
        first.setdefault(name, key)
    for i, column in enumerate(schema.categorical):
        yield from _column_faults(f"categorical[{i}]", column)
    delimiter = schema.delimiter
    if delimiter == '"' or not (
        delimiter == "\t" or delimiter.isascii() and delimiter.isprintable()
    ):
        yield f"delimiter = {delimiter!r}: must be a tab, or a character of ASCII that is no quote"
    yield from _criteo_faults(schema) if schema.format == "criteo" else _split_faults(schema.split)


def _column_faults(key: str, column: CategoricalColumn) -> Iterator[str]:
    if column.separator is not None and column.max_length == 1:
        yield f"{key}.separator: only with max_length > 1, a multi-hot column"
    if column.missing != "own" and column.max_length > 1:
        yield f"{key}.missing: only with max_length = 1: lists may be empty"
    if column.kind != "integer":
        if column.bucket is not None:
            yield f"{key}.bucket: only with kind: integer, not {column.kind}"
        if isinstance(column.missing, int):
            yield (
                f"{key}.missing = {column.missing}: a number needs kind: integer, not {column.kind}"
            )
    if (dim := column.embedding_dim) is not None:
        own = f"column {column.name!r} cannot have a width of its own"
        yield f"{key}.embedding_dim = {dim}: {own}; all tables have model.embedding_dim"
    if column.expand_to > 1 and column.max_length > 1:
        yield f"{key}.expand_to: only with max_length = 1, a column of one id a row"


def _split_faults(split: Split | None) -> Iterator[str]:
    if split is None:
        yield "split: missing; by: fraction, file or time"
    elif isinstance(split, ByFraction):
        if split.test == 0:
            yield "split.test = 0: some rows must test the model"
        if split.validation + split.test >= 1:
            left = f"{split.validation} + {split.test}"
            yield f"split.validation + split.test = {left}: no rows are left to train"
    elif isinstance(split, ByTime):
        early, late = split.validation_from, split.test_from
        if early is not None and isinstance(early, str) != isinstance(late, str):
            yield f"split.validation_from = {early!r}: not of the type of test_from = {late!r}"
        elif early is not None and cast(Any, early) > cast(Any, late):
            yield f"split.validation_from = {early!r}: after test_from = {late!r}"


def _criteo_faults(schema: Schema) -> Iterator[str]:
    if schema.split is not None:
        yield "split: not with format: criteo; data.days and data.day_split say it"
    if schema.multi_hot:
        yield f"categorical[{schema.multi_hot[0]}].max_length: must be 1 with format: criteo"
    for i, column in enumerate(schema.categorical):
        if column.bucket is not None or column.missing != "own":
            yield f"categorical[{i}]: bucket and missing are not read with format: criteo"


def _flat(value: Any, key: str = "data.schema") -> dict[str, Any]:
    """Values of nested mappings and sequences by key: `data.schema.dense[0].name`."""
    if isinstance(value, dict):
        pairs = cast("dict[str, Any]", value).items()
        return {k: v for name, one in pairs for k, v in _flat(one, f"{key}.{name}").items()}
    if isinstance(value, (list, tuple)):
        items = enumerate(cast("list[Any]", value))
        return {k: v for i, one in items for k, v in _flat(one, f"{key}[{i}]").items()}
    return {key: value}
