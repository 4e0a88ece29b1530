"""Reads schemas from YAML: the package's, which lie in this folder, and the user's own files.

`named` finds either; `loads` validates a whole text and reports each fault in a line.
"""

from __future__ import annotations

import functools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails
from yaml import MarkedYAMLError, YAMLError
from yaml.nodes import MappingNode, Node, ScalarNode

from dlrm_hybrid.data.schema import (
    Border,
    ByFraction,
    ByTime,
    CategoricalColumn,
    Default,
    Label,
    Schema,
    Split,
    adapter,
)
from dlrm_hybrid.data.sources.cells import FORM, is_number, keys_of, nanoseconds, split_list
from dlrm_hybrid.types import ConfigError, DataError

MOST_BYTES = 1 << 24
SHOWN_CHARACTERS = 60
YAML = ".yaml"
_PLACE = re.compile(r"(dense|categorical)\[(\d+)\]")
_NANOSECONDS = re.compile(r"\.[0-9]{7}")
PACKAGE = "dlrm_hybrid.data.schemas"
OF_A_TABLE = (
    *("kind", "hash_size", "min_count", "bucket", "missing", "max_rows", "evict"),
    *("trainable", "embedding_dim"),
)
"""Keys that columns with one table must have alike."""


def named(name: str) -> Schema:
    """The schema that `data.schema` names: a schema of the package, or a file.

    Raises:
        ConfigError: see `read`; or the schema is for Criteo's text, which other choices of `data`
            read.
    """
    if not is_builtin(name):
        return read(Path(name))
    schema = builtin(name)
    if schema.format == "criteo":
        raise ConfigError(f"data.schema = {name!r}: is of data={name}, not of data=table")
    return schema


def read(path: Path) -> Schema:
    """Read the schema of a table from a YAML file.

    Raises:
        ConfigError: it cannot be read or has faults; a line for each, with file, key and value.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path}: more than {MOST_BYTES} bytes: no schema (data.schema)")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        tables = ", ".join(name for name in _builtins() if builtin(name).format == "table")
        fault = f"data.schema = {str(path)!r}: no such file; the package has {tables}"
        raise ConfigError(fault) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason} (data.schema)") from error
    return loads(text, str(path))


@functools.cache
def builtin(name: str) -> Schema:
    """Read a schema of the package; raises DataError, with all names, if there is none."""
    if name not in _builtins():
        raise DataError(f"{name!r} is not one of: {', '.join(_builtins())}")
    file = resources.files(PACKAGE) / f"{name}{YAML}"
    return loads(file.read_text(encoding="utf-8"), file.name)


def is_builtin(name: str) -> bool:
    """Whether `data.schema` names a schema that comes with the package."""
    return name in _builtins()


@functools.cache
def _builtins() -> tuple[str, ...]:
    names = (file.name for file in resources.files(PACKAGE).iterdir())
    return tuple(sorted(name.removesuffix(YAML) for name in names if name.endswith(YAML)))


def loads(text: str, name: str) -> Schema:
    """Read a schema from YAML; raises ConfigError with a line, after `name`, for each fault."""
    try:
        values: Any = yaml.load(text, Loader=_Loader)  # a SafeLoader
    except (YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{name}{_yaml_fault(error)} (data.schema)") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: a schema is a mapping of label, dense, … (data.schema)")
    try:
        # Through JSON, as strict mode takes a list for a tuple only there.
        schema = adapter().validate_json(json.dumps(values))
    except ValidationError as error:
        faults = _lines(error.errors(include_url=False))
    else:
        faults = list(_faults(schema))
        if not faults:
            return schema
    named = (f"{name}: {fault}{_column_of(fault, values)}" for fault in dict.fromkeys(faults))
    raise ConfigError("\n".join(named))


def _column_of(fault: str, values: Any) -> str:
    """The end of a fault, with the name of its column; empty where it has none, or says it."""
    if (place := _PLACE.match(fault)) is not None:
        with suppress(LookupError, TypeError):
            column = values[place[1]][int(place[2])]["name"]
            return "" if repr(column) in fault else f" (column {column!r:.80})"
    return ""


class _Loader(yaml.SafeLoader):
    """Reads the part of YAML that JSON has: all keys text and distinct, times as text.

    Refuses aliases, whose text can grow beyond all bounds, and numbers beyond the range of floats.
    """

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
        mapping = cast("dict[Any, Any]", super().construct_mapping(node, deep))
        for key in mapping:
            if not isinstance(key, str):
                fault = f"the key {key!r:.60} must be text: quote it"
                raise MarkedYAMLError(problem=fault, problem_mark=node.start_mark)
        return mapping

    def number(self, node: ScalarNode) -> int:
        """A whole number; Python refuses to print one of more than some thousand digits."""
        try:
            integer = super().construct_yaml_int(node)
            float(integer)
        except (ValueError, OverflowError) as error:
            fault = f"{node.value[:SHOWN_CHARACTERS]}… of {len(node.value)} characters is no number"
            raise MarkedYAMLError(problem=fault, problem_mark=node.start_mark) from error
        return integer

    def time(self, node: ScalarNode) -> str:
        """A time as Python writes it, or unchanged if Python's cannot represent it."""
        if _NANOSECONDS.search(node.value):
            return node.value
        try:
            return str(super().construct_yaml_timestamp(node))
        except ValueError:  # 24:00
            return node.value

    def other(self, node: Node) -> Any:
        """Refuse what JSON does not have: bytes, sets and pairs."""
        raise MarkedYAMLError(
            problem=f"{node.tag.replace('tag:yaml.org,2002:', '!!')} is not for schemas",
            problem_mark=node.start_mark,
        )


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", _Loader.time)
for _tag in ("binary", "set", "omap", "pairs"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.other)


def _yaml_fault(error: Exception) -> str:
    mark = error.problem_mark if isinstance(error, MarkedYAMLError) else None
    where = "" if mark is None else f":{mark.line + 1}:{mark.column + 1}"
    reason = error.problem if isinstance(error, MarkedYAMLError) else str(error)
    return f"{where}: not YAML: {reason}"


def _lines(errors: Sequence[ErrorDetails]) -> list[str]:
    """Pydantic's errors, one line for each value, though a union has an error for each type."""
    reasons: dict[str, list[str]] = {}
    for error in errors:
        path = error["loc"]
        # Pydantic does not count an invalid column, which is no fault of its own.
        if error["type"] == "too_short" and any(
            len(inner["loc"]) > len(path) and inner["loc"][: len(path)] == path for inner in errors
        ):
            continue
        head, reason = _fault(error)
        reasons.setdefault(head, []).append(reason)
    return [f"{head}: {', or '.join(several)}" for head, several in reasons.items()]


def _fault(error: ErrorDetails) -> tuple[str, str]:
    """The key with value and the reason of an error: `categorical[2].min_count = -3`, `must …`."""
    tags = ("file", "fraction", "time", "text", "mapping", "list")
    # Position 3 has the tag of a label in a list.
    path = [part for i, part in enumerate(error["loc"]) if not (part in tags and i in (1, 3))]
    kind = error["type"]
    is_unknown = kind in ("unexpected_keyword_argument", "extra_forbidden")
    key = ""
    for i, part in enumerate(path):
        # Pydantic names the tried type of a union in the path; an unknown key may have any name.
        is_tried = part in ("int", "float", "str") or not str(part).replace("_", "").isalnum()
        if is_tried and not (is_unknown and i == len(path) - 1):
            continue
        key += f"[{part}]" if isinstance(part, int) else f".{part}" if key else str(part)
    if is_unknown:
        return key, "unknown key"
    if kind in ("missing", "missing_argument", "union_tag_not_found"):
        return f"{key}{'.by' if kind == 'union_tag_not_found' else ''}", "missing"
    value = repr(error["input"])
    text = value if len(value) <= SHOWN_CHARACTERS else f"{value[:SHOWN_CHARACTERS]}…"
    return f"{key} = {text}", error["msg"].replace("Input should", "must", 1)


def _faults(schema: Schema) -> Iterator[str]:
    columns = [
        *(("label", name) for name in schema.label_columns),
        *([] if schema.weight is None else [("weight", schema.weight)]),
        *((f"dense[{i}].name", column.name) for i, column in enumerate(schema.dense)),
        *(
            ("dense", f"{column.name}[{at}]")
            for column in schema.dense
            if column.length > 1
            for at in range(column.length)
        ),
        *((f"categorical[{i}].name", column.name) for i, column in enumerate(schema.categorical)),
        *(
            (f"categorical[{i}].weights", schema.categorical[i].weights or "")
            for i in schema.weighted
        ),
        *((f"ignore[{i}]", name) for i, name in enumerate(schema.ignore)),
    ]
    key_of: dict[str, str] = {}
    for key, name in columns:
        if name in key_of:
            yield f"{key} = {name!r}: is {key_of[name]} too"
        key_of.setdefault(name, key)
    yield from _name_faults(schema, key_of)
    yield from _table_faults(schema)
    yield from _value_faults(schema)
    yield from _label_faults(schema)
    for i, column in enumerate(schema.categorical):
        yield from _column_faults(f"categorical[{i}]", column)
    delimiter = schema.delimiter
    if delimiter == '"' or not (
        delimiter == "\t" or delimiter.isascii() and delimiter.isprintable()
    ):
        yield f"delimiter = {delimiter!r}: must be a tab, or a character of ASCII that is no quote"
    yield from _criteo_faults(schema) if schema.format == "criteo" else _split_faults(schema.split)


def _label_faults(schema: Schema) -> Iterator[str]:
    """Faults of the keys that make labels, and of their names."""
    if isinstance(label := schema.label, str):
        return
    if isinstance(label, Label):
        if (label.positive is None) == (label.above is None):
            yield f"label: {label.column!r} needs either `positive` or `above`"
        if label.name is not None or label.loss_weight != 1:
            key = "loss_weight" if label.name is None else "name"
            yield f"label.{key} = {getattr(label, key)!r}: only of one in a list of several labels"
        return
    if len(label) < 2:
        yield "label: a list has two labels or more; one is written without brackets"
    numbers: dict[str, int] = {}
    for i, item in enumerate(schema.labels):
        if item.positive is not None and item.above is not None:
            yield f"label[{i}]: {item.column!r} needs either `positive` or `above`, or neither"
        name = item.name or item.column
        if numbers.setdefault(name, i) != i:
            yield f"label[{i}].name = {name!r}: is that of label[{numbers[name]}] too"


def _name_faults(schema: Schema, columns: Collection[str]) -> Iterator[str]:
    """Faults of `names`, which stand for the header of a file."""
    if not schema.names:
        return
    if schema.format == "criteo":
        yield "names: not with format: criteo, whose columns have theirs"
    for i, name in enumerate(schema.names):
        if name in schema.names[:i]:
            yield f"names[{i}] = {name!r}: is names[{schema.names.index(name)}] too"
        elif name not in columns and name not in schema.read_columns:
            yield f"names[{i}] = {name!r}: no column of the schema; use it or name it in `ignore`"
    required = dict.fromkeys((*schema.read_columns, *schema.ignore))
    if missing := [name for name in required if name not in schema.names]:
        yield f"names: lacks {', '.join(map(repr, missing))}"


def _table_faults(schema: Schema) -> Iterator[str]:
    """Faults of columns that share tables, and so must agree on what makes a category."""
    columns: dict[str, CategoricalColumn] = {}
    alone = {column.name for column in schema.categorical if column.table is None}
    for i, column in enumerate(schema.categorical):
        if (table := column.table) is None:
            continue
        key, first = f"categorical[{i}]", columns.setdefault(table, column)
        if schema.format == "criteo":
            yield f"{key}.table = {table!r}: not with format: criteo, whose columns have their own"
        if table in alone:
            yield (
                f"{key}.table = {table!r}: is a column that does not name it; give column "
                f"{table!r} this table too, or the table another name"
            )
        if column.expand_to > 1:
            yield f"{key}.expand_to: not with table, as its bags are of the table's own rows"
        if column.vectors is not None:
            yield f"{key}.vectors: not with table, whose rows begin alike for all its columns"
        for name in OF_A_TABLE:
            expected, value = getattr(first, name), getattr(column, name)
            if expected != value:
                yield (
                    f"{key}.{name} = {value!r}: column {column.name!r} has the table {table!r} "
                    f"with {first.name!r}, whose {name} is {expected!r}: must be the same"
                )


def _value_faults(schema: Schema) -> Iterator[str]:
    for i, word in enumerate(schema.missing_values):
        if is_number(word):
            yield f"missing_values[{i}] = {word!r}: is a number, which is never missing"
    yield from _dense_faults(schema)
    for i, column in enumerate(schema.categorical):
        if column.max_rows is not None and column.hash_size:
            yield f"categorical[{i}].max_rows = {column.max_rows}: not with hash_size"
        if column.vectors is not None and column.hash_size:
            yield f"categorical[{i}].vectors: not with hash_size, by which categories share rows"
        if column.evict is not None and column.max_rows is None:
            yield f"categorical[{i}].evict = {column.evict}: only with max_rows, a table that fills"


def _dense_faults(schema: Schema) -> Iterator[str]:
    for i, dense in enumerate(schema.dense):
        if dense.length > 1 and dense.default not in (None, ""):
            yield f"dense[{i}].default = {dense.default!r}: of lists only a missing one, ''"
        elif dense.default not in (None, "") and not is_number(dense.default):
            yield f"dense[{i}].default = {dense.default!r}: is no number"
        if dense.separator is not None and dense.length == 1:
            yield f"dense[{i}].separator: only with length > 1, a column of lists"


def _column_faults(key: str, column: CategoricalColumn) -> Iterator[str]:
    yield from _list_faults(key, column)
    if column.default is not None:
        yield from _default_faults(f"{key}.default = {column.default!r}", column, column.default)
    if column.missing != "own" and column.max_length > 1:
        yield f"{key}.missing: only with max_length = 1: lists may be empty"
    if column.kind != "integer":
        if column.bucket is not None:
            yield f"{key}.bucket: only with kind: integer, not {column.kind}"
        if isinstance(column.missing, int):
            yield (
                f"{key}.missing = {column.missing}: a number needs kind: integer, not {column.kind}"
            )
    if column.expand_to > 1 and column.max_length > 1:
        yield f"{key}.expand_to: only with max_length = 1, a column of one id a row"


def _list_faults(key: str, column: CategoricalColumn) -> Iterator[str]:
    of_lists = {"separator": None, "truncate": "error", "pooling": "sum", "weights": None}
    for name, default in of_lists.items() if column.max_length == 1 else ():
        if getattr(column, name) != default:
            yield f"{key}.{name}: only with max_length > 1, a multi-hot column"
    if column.weights is not None and column.pooling != "sum":
        yield f"{key}.weights: only with pooling: sum, not {column.pooling}"
    if column.weights is not None and column.default is not None:
        yield f"{key}.default = {column.default!r}: not with weights, which have none"


def _default_faults(key: str, column: CategoricalColumn, default: Default) -> Iterator[str]:
    parts: list[Default] = [default]
    if column.max_length > 1:
        if default != "" and column.separator is None:
            yield f"{key}: a list needs a separator"
        try:
            parts = [part for part in split_list(str(default), column.separator or " ") if part]
        except ValueError as error:
            yield f"{key}: {error}"
            return
    yield from (f"{key}: {fault}" for fault in keys_of(parts, column)[1].values())


def _split_faults(split: Split | None) -> Iterator[str]:
    if split is None:
        yield "split: missing; by: fraction, file or time"
    elif isinstance(split, ByFraction):
        if split.test == 0:
            yield "split.test = 0: some rows must test the model"
        if split.validation + split.test >= 1:
            shares = f"{split.validation} + {split.test}"
            yield f"split.validation + split.test = {shares}: no rows are left to train"
    elif isinstance(split, ByTime):
        early, late = split.validation_from, split.test_from
        for key, border in (("validation_from", early), ("test_from", late)):
            if isinstance(border, str) and (fault := _border_fault(border)):
                yield f"split.{key} = {border!r}: {fault}"
        if early is not None and isinstance(early, str) != isinstance(late, str):
            yield f"split.validation_from = {early!r}: not of the type of test_from = {late!r}"
        elif early is not None and _order(early) > _order(late):
            yield f"split.validation_from = {early!r}: after test_from = {late!r}"


def _border_fault(border: str) -> str | None:
    moment = nanoseconds(border)
    if moment is None:
        return f"is not {FORM}"
    return "rows are compared to the microsecond, not beyond" if moment % 1000 else None


def _order(border: Border) -> float:
    """A number to order borders by; 0 for text that is no time."""
    return (nanoseconds(border) or 0) if isinstance(border, str) else border


def _criteo_faults(schema: Schema) -> Iterator[str]:
    if schema.weight is not None:
        yield "weight: not with format: criteo, whose rows have none"
    if schema.group is not None:
        yield "group: not with format: criteo, whose rows have none"
    if not isinstance(schema.label, str):
        yield "label: not with format: criteo, whose labels are 0 and 1"
    if schema.split is not None:
        yield "split: not with format: criteo; data.days and data.day_split say it"
    if schema.multi_hot:
        yield f"categorical[{schema.multi_hot[0]}].max_length: must be 1 with format: criteo"
    if schema.num_dense > len(schema.dense):
        yield "dense: length must be 1 with format: criteo"
    for i, column in enumerate(schema.categorical):
        if column.vectors is not None:
            yield f"categorical[{i}].vectors: not read with format: criteo"
        if column.bucket is not None or column.missing != "own":
            yield f"categorical[{i}]: bucket and missing are not read with format: criteo"
