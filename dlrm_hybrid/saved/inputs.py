"""What an exported model takes, made of rows as they are, by the folder that `export` wrote.

Needs neither torch nor Arrow: numpy and the folder's `model.json` and vocabularies do.

Shapes: B rows, I dense columns, S columns with one id a row, L ids of a row of another column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.schema import CategoricalColumn
from dlrm_hybrid.data.sources.keys import Key, keys_of, missing_key
from dlrm_hybrid.types import DataError

READ = ("name", "kind", "hash_size", "bucket", "missing")
_LARGEST = float(np.finfo(np.float32).max)
Row = Mapping[str, Any]
"""Values by column, as JSON has them; what is left out, null or an empty text is missing."""


@final
class ModelInputs:
    """The inputs of `model.onnx` or `model.pt2` by name, for rows of raw values.

    Args:
        folder: with `model.json` and the vocabularies that it names.

    Raises:
        OSError: a file is missing.
        DataError: it has weights of bags (`expand_to`) instead of a graph.
    """

    def __init__(self, folder: str | Path) -> None:
        about = json.loads(Path(folder, "model.json").read_text(encoding="utf-8"))
        self._modulo: int = about["data"]["max_ind_range"] or 0
        self._columns: dict[str, list[dict[str, Any]]] = {
            name: one["columns"] for name, one in about["inputs"].items()
        }
        lists = [columns[0] for name, columns in self._columns.items() if name.startswith("ids_")]
        if bags := [one["name"] for one in lists if one.get("expand_to", 1) > 1]:
            raise DataError(
                f"{folder}: the ids of {', '.join(bags)} stand for bags (expand_to), which only "
                "export.format=onnx and pt2 have in their tables"
            )
        self._ids = {
            one["name"]: _ids(Path(folder, one["vocabulary"]), one["first_id"])
            for name, columns in self._columns.items()
            for one in columns
            if name != "dense"
        }

    def __call__(self, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        """`dense` float32 (B, I), `ids` int64 (B, S), and for each other column int64 (B, L).

        Raises:
            DataError: a value is none of its column, or no row of a table stands for a category.
        """
        if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(f"{rows!r:.60} is not a list of rows")
        for number, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DataError(f"row {number}: {row!r:.60} is not an object of values by column")
        found: dict[str, npt.NDArray[Any]] = {}
        for name, columns in self._columns.items():
            if name == "dense":
                values = [[_number(row.get(one["name"]), one) for one in columns] for row in rows]
                found[name] = np.array(values, np.float32).reshape(len(rows), len(columns))
            elif name == "ids":
                of_columns = [
                    self._of([row.get(one["name"]) for row in rows], one) for one in columns
                ]
                found[name] = np.array(of_columns, np.int64).reshape(len(columns), len(rows)).T
            else:
                lists = [_list(row.get(columns[0]["name"]), columns[0]) for row in rows]
                ids = [self._of(one, columns[0]) for one in lists]
                most = max([1, *map(len, ids)])
                found[name] = np.array(
                    [one + [-1] * (most - len(one)) for one in ids], np.int64
                ).reshape(len(rows), most)
        return {name: np.ascontiguousarray(one) for name, one in found.items()}

    def _of(self, values: Sequence[Any], column: Mapping[str, Any]) -> list[int]:
        """The row of its table for each value of a column."""
        read = CategoricalColumn(**{key: column[key] for key in READ if key in column})
        keys, faults = keys_of([None if value == "" else value for value in values], read)
        for reason in faults.values():
            raise DataError(f"{column['name']}: {reason}")
        if self._modulo:
            keys = [key % self._modulo if isinstance(key, int) else key for key in keys]
        known = self._ids[column["name"]]
        for key in keys:
            if key not in known and not column["first_id"]:
                what = "a missing value" if key == missing_key(read) else f"category {key!r:.60}"
                raise DataError(f"{column['name']}: {what} was not seen in training")
        return [known.get(key, 0) for key in keys]


def _ids(path: Path, first_id: int) -> dict[Key, int]:
    """The id of each category of a vocabulary."""
    is_text = path.suffix == ".json"
    keys = json.loads(path.read_text(encoding="utf-8")) if is_text else np.load(path).tolist()
    return {key: first_id + place for place, key in enumerate(keys)}


def _number(value: Any, column: Mapping[str, Any]) -> float:
    """A dense value as the model takes it."""
    if value is None or value == "" or value != value:  # NaN
        value = column["missing"]
    try:
        x = float(value) if isinstance(value, (int, float)) else math.inf
    except OverflowError:  # a whole number that no float is near to
        x = math.inf
    if math.isinf(x):
        raise DataError(f"{column['name']}: {value!r:.60} is not a finite number")
    x = math.log1p(max(x, 0.0)) if column["transform"] == "log1p" else x
    if abs(x) > _LARGEST:
        raise DataError(f"{column['name']}: {value!r:.60} is outside 32 bits")
    return (x - column.get("mean", 0.0)) / column.get("deviation", 1.0)


def _list(value: Any, column: Mapping[str, Any]) -> list[Any]:
    """The categories of a row, as a list or as text with the separator; empty ones left out."""
    separator, most = column.get("separator"), column.get("max_length")
    if isinstance(value, str):
        value = value.split(separator) if separator else [value]
    elif value is None or isinstance(value, float) and math.isnan(value):
        value = ()
    elif not isinstance(value, (list, tuple, np.ndarray)):
        raise DataError(f"{column['name']}: {value!r:.60} is no list")
    found = cast("Sequence[Any]", value)
    if most is not None and len(found) > most:
        raise DataError(f"{column['name']}: {len(found)} values, max_length = {most}")
    return [one for one in found if one is not None and one != ""]
