"""What an exported model takes, made of rows as they are, by the folder that `export` wrote.

Needs neither torch nor Arrow: numpy and the folder's `model.json` and vocabularies do.

Shapes: B rows, I dense columns, S columns with one id a row, L ids of a row of another column.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from dlrm_hybrid.data.schema import CategoricalColumn, DenseColumn, Extra, Schema
from dlrm_hybrid.data.sources.cells import (
    Key,
    is_missing,
    keys_of,
    missing_key,
    number,
    plain_value,
    shown,
    split_list,
)
from dlrm_hybrid.data.sources.dense import transformed
from dlrm_hybrid.types import DataError

Row = Mapping[str, Any]
"""Values by column, as JSON has them; null and an empty text are missing values."""


@final
class ModelInputs:
    """The inputs of `model.onnx` or `model.pt2` by name, for rows of raw values.

    Args:
        folder: with `model.json` and the vocabularies that it names.
        extra: whether columns that the schema does not name are an `error`, or left alone.

    Raises:
        OSError: a file is missing.
        DataError: it has weights of bags (`expand_to`) instead of a graph.
    """

    def __init__(self, folder: str | Path, *, extra: Extra = "error") -> None:
        about = json.loads(Path(folder, "model.json").read_text(encoding="utf-8"))
        self._modulo: int = about["data"]["max_ind_range"] or 0
        self._extra: Extra = extra
        schema = TypeAdapter(Schema).validate_json(json.dumps(about["data"]["schema"]))
        self._schema = schema.for_scoring
        self._missing = frozenset(schema.missing_values)
        columns: dict[str, list[dict[str, Any]]] = {
            name: one["columns"] for name, one in about["inputs"].items()
        }
        lists = [of[0] for name, of in columns.items() if name.startswith("ids_")]
        if bags := [one["name"] for one in lists if one.get("expand_to", 1) > 1]:
            raise DataError(
                f"{folder}: the ids of {', '.join(bags)} stand for bags (expand_to), which only "
                "export.format=onnx and pt2 have in their tables"
            )
        self._inputs = {name: [one["name"] for one in of] for name, of in columns.items()}
        self._scales = {
            one["name"]: (one.get("mean", 0.0), one.get("deviation", 1.0))
            for one in columns.get("dense", [])
        }
        categorical = [one for name, of in columns.items() if name != "dense" for one in of]
        self._first_ids: dict[str, int] = {one["name"]: one["first_id"] for one in categorical}
        self._ids = {
            one["name"]: _ids(Path(folder, one["vocabulary"]), one["first_id"])
            for one in categorical
        }

    def __call__(self, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        """`dense` float32 (B, I), `ids` int64 (B, S), and for each other column int64 (B, L).

        Raises:
            DataError: a column is missing or unknown, a value is none of its column, or no row of a
                table stands for a category; names row, from 1, and column.
        """
        if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(f"{rows!r:.60} is not a list of rows")
        self._check_columns(rows)
        dense = {one.name: one for one in self._schema.dense}
        categorical = {one.name: one for one in self._schema.categorical}
        found: dict[str, npt.NDArray[Any]] = {}
        for name, names in self._inputs.items():
            columns = [[self._value(row, one) for row in rows] for one in names]
            if name == "dense":
                of_columns = [
                    self._dense(values, dense[one])
                    for one, values in zip(names, columns, strict=True)
                ]
                found[name] = np.array(of_columns, np.float32).reshape(len(names), len(rows)).T
            elif name == "ids":
                of_columns = [
                    self._of(values, categorical[one], range(len(rows)))
                    for one, values in zip(names, columns, strict=True)
                ]
                found[name] = np.array(of_columns, np.int64).reshape(len(names), len(rows)).T
            else:
                column = categorical[names[0]]
                lists = [self._list(row, value, column) for row, value in enumerate(columns[0])]
                ids = [
                    self._of(values, column, [row] * len(values))
                    for row, values in enumerate(lists)
                ]
                most = max([1, *map(len, ids)])
                found[name] = np.array(
                    [one + [-1] * (most - len(one)) for one in ids], np.int64
                ).reshape(len(rows), most)
        return {name: np.ascontiguousarray(one) for name, one in found.items()}

    def _check_columns(self, rows: Sequence[Row]) -> None:
        fine: set[tuple[str, ...]] = set()  # most rows have the same columns
        for at, row in enumerate(rows):
            if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise _refusal(at, f"{row!r:.60} is not an object of values by column")
            names = tuple(row)
            if names in fine:
                continue
            if fault := self._schema.columns_fault(names, self._extra):
                raise _refusal(at, fault)
            fine.add(names)

    def _value(self, row: Row, name: str) -> Any:
        """A value of a row, or what the schema has instead."""
        value = row[name] if name in row else self._schema.defaults[name]
        return plain_value(value, self._missing)

    def _dense(self, values: Sequence[Any], column: DenseColumn) -> npt.NDArray[np.float32]:
        """The dense values of a column as the model takes them."""
        x_B = np.empty(len(values))
        for index, value in enumerate(values):
            try:
                x_B[index] = number(value)
            except ValueError as error:
                raise _refusal(index, f"{shown(value)} {error}", column.name) from None
        x_B, faults = transformed(x_B, column)
        mean, deviation = self._scales[column.name]
        with np.errstate(over="ignore"):
            found_B = ((x_B - mean) / deviation).astype(np.float32)
        beyond = dict.fromkeys(np.flatnonzero(np.isinf(found_B)).tolist(), "is outside 32 bits")
        for index, reason in sorted({**beyond, **faults}.items()):
            raise _refusal(index, f"{shown(values[index])} {reason}", column.name)
        return found_B

    def _of(
        self, values: Sequence[Any], column: CategoricalColumn, row_of: Sequence[int]
    ) -> list[int]:
        """The row of its table for each value of a column; `row_of` has the row it comes from."""
        keys, faults = keys_of(values, column)
        for place, reason in faults.items():
            raise _refusal(row_of[place], reason, column.name)
        if self._modulo:
            keys = [key % self._modulo if isinstance(key, int) else key for key in keys]
        known = self._ids[column.name]
        if not self._first_ids[column.name]:
            for place in (place for place, key in enumerate(keys) if key not in known):
                key = keys[place]
                what = "a missing value" if key == missing_key(column) else f"category {key!r:.60}"
                raise _refusal(row_of[place], f"{what} was not seen in training", column.name)
        return [known.get(key, 0) for key in keys]

    def _list(self, row: int, value: Any, column: CategoricalColumn) -> list[Any]:
        """The categories of a row, as a list or as text with the separator; empty ones left out."""
        if is_missing(value):
            value = ()
        elif isinstance(value, str) and column.separator is not None:
            try:
                value = split_list(value, column.separator)
            except ValueError as error:
                raise _refusal(row, f"{shown(value)} {error}", column.name) from None
        elif not isinstance(value, (list, tuple, np.ndarray)):
            raise _refusal(row, f"{shown(value)} is no list", column.name)
        found = [plain_value(one, self._missing) for one in cast("Sequence[Any]", value)]
        most = column.max_length
        if len(found) > most and column.truncate == "error":
            raise _refusal(row, f"{len(found)} values, max_length = {most}", column.name)
        found = found[-most:] if column.truncate == "last" else found[:most]
        return [one for one in found if not is_missing(one)]


def _refusal(row: int, reason: str, column: str = "") -> DataError:
    """The error for a row, counted from 1 in its text as in files."""
    return DataError(f"row {row + 1}: {f'column {column!r}: ' if column else ''}{reason}")


def _ids(path: Path, first_id: int) -> dict[Key, int]:
    """The id of each category of a vocabulary."""
    if path.suffix == ".json":
        keys: Sequence[Key] = json.loads(path.read_text(encoding="utf-8"))
    else:
        keys = np.load(path).tolist()
    return {key: id for id, key in enumerate(keys, first_id)}
