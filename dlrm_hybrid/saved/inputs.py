"""Inputs of an exported model from raw rows, and the description of them that `export` writes.

Needs neither torch nor Arrow, only numpy and the folder's `model.json` and vocabularies.

Shapes: B rows, I dense columns, S columns with one id per row, L ids per row of another column.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.arrays import Float32s, Float64s, Int64s
from dlrm_hybrid.bags import Bags, lengths_of, table_offsets
from dlrm_hybrid.bounds import Extra
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER, Scale
from dlrm_hybrid.data.preprocessing import Keys, ModelColumns, Preprocessing, Vocabulary
from dlrm_hybrid.data.schema import CategoricalColumn, DenseColumn, adapter
from dlrm_hybrid.data.sources.cells import (
    is_missing,
    keys_of,
    number,
    plain_value,
    shown,
    split_list,
)
from dlrm_hybrid.data.sources.columns import Coded, Values, transformed
from dlrm_hybrid.disk import MOST_JSON_BYTES, plain_file, read_text
from dlrm_hybrid.saved.encoding import Encoder, RefusedValueError
from dlrm_hybrid.types import DataError

MODEL_FILE = "model.json"
INSTEAD = "; name a folder that `export` has written"
Row = Mapping[str, Any]
"""Values of JSON by column; null and an empty text are missing values."""


@dataclass(frozen=True, slots=True)
class ListInputs:
    """The categorical columns, by index, with an input of their own for any number of ids a row.

    Attributes:
        columns: these columns.
        averaged: those of them whose rows are averaged, not summed.
        weighted: those of them whose ids have weights.
    """

    columns: tuple[int, ...] = ()
    averaged: tuple[int, ...] = ()
    weighted: tuple[int, ...] = ()


NO_LISTS = ListInputs()


def list_name(number: int) -> str:
    """Name of the input for the lists of a multi-hot column, numbered from 0."""
    return f"ids_{number + 1}"


def weights_name(number: int) -> str:
    """Name of the input for the weights of the ids in `list_name`."""
    return f"weights_{number + 1}"


def inputs_of(
    dense_BI: Float32s, bags: Bags[Int64s], lists: ListInputs = NO_LISTS
) -> dict[str, npt.NDArray[Any]]:
    """The named inputs of an exported graph; `dense` only if there are dense columns."""
    lengths_FB, first_F = lengths_of(bags), table_offsets(bags).tolist()
    values_N = bags.values.reshape(-1)
    ids = [values_N[first:stop] for first, stop in pairwise(first_F)]
    single = [ids_N for table, ids_N in enumerate(ids) if table not in lists.columns]
    ids_BS = np.stack(single, 1) if single else np.empty((bags.rows, 0), np.int64)
    inputs: dict[str, npt.NDArray[Any]] = {"dense": dense_BI, "ids": ids_BS}
    of_weights: dict[str, npt.NDArray[Any]] = {}
    if not dense_BI.shape[1]:
        del inputs["dense"]
    for table in lists.columns:
        length_B = lengths_FB[table]
        most = max(1, int(length_B.max(initial=0)))
        ids_BL = np.full((bags.rows, most), -1, np.int64)
        is_id_BL = np.arange(most) < length_B[:, None]
        ids_BL[is_id_BL] = ids[table]
        inputs[list_name(table)] = ids_BL
        if table in lists.weighted:
            of_weights[weights_name(table)] = weights_BL = np.zeros((bags.rows, most), np.float32)
            weights_BL[is_id_BL] = bags.weights[first_F[table] : first_F[table + 1]]
    return inputs | of_weights


def dense_description(column: DenseColumn, scale: Scale | None) -> dict[str, Any]:
    """The description of a dense column in `model.json`; `scale` is None if not standardised."""
    return (
        {"name": column.name, "transform": column.transform, "missing": column.missing}
        | ({} if column.default is None else {"default": column.default})
        | ({} if scale is None else {"mean": scale.mean, "deviation": scale.deviation})
    )


def _description(vocabulary: Vocabulary, file: str) -> dict[str, Any]:
    column = vocabulary.column
    keys = ("name", "kind", "hash_size", "bucket", "missing", "separator")
    lists = ("max_length", "truncate") if column.max_length > 1 else ()
    default = () if column.default is None else ("default",)
    table = () if column.table is None else ("table",)
    expanded = ("expand_to",) if column.expand_to > 1 else ()
    pooling = ("pooling",) if column.pooling != "sum" else ()
    return {
        **{key: getattr(column, key) for key in keys},
        "vocabulary": file,
        "first_id": vocabulary.first_id,
        "rows": vocabulary.table_rows,
        **{key: getattr(column, key) for key in (*lists, *default, *expanded, *pooling, *table)},
    }


def write_inputs(folder: Path, preprocessing: Preprocessing, lists: ListInputs) -> dict[str, Any]:
    """Write vocabularies (`vocabulary/1.npy`, texts `1.json`); describe inputs for `model.json`."""
    (folder / VOCABULARY_FOLDER).mkdir()
    columns: list[dict[str, Any]] = []
    firsts = preprocessing.schema.first_columns
    for place, vocabulary in enumerate(preprocessing.vocabularies()):
        first = firsts[place]
        file = f"{VOCABULARY_FOLDER}/{first + 1}.{'json' if vocabulary.column.has_texts else 'npy'}"
        if first < place:
            pass  # has been written
        elif vocabulary.column.has_texts:
            (folder / file).write_text(json.dumps([*vocabulary.keys]), encoding="utf-8")
        else:
            np.save(folder / file, np.asarray(vocabulary.keys, vocabulary.column.key_type))
        columns.append(_description(vocabulary, file))
    scales, schema = preprocessing.manifest.scales, preprocessing.schema
    dense = [*map(dense_description, schema.inputs, scales)]
    singles = [column for place, column in enumerate(columns) if place not in lists.columns]
    return {
        **({"dense": {"dtype": "float32", "columns": dense}} if dense else {}),
        "ids": {"dtype": "int64", "columns": singles},
        **{list_name(k): {"dtype": "int64", "columns": [columns[k]]} for k in lists.columns},
        **{
            weights_name(k): {
                "dtype": "float32",
                "columns": [{"name": schema.categorical[k].weights}],
            }
            for k in lists.weighted
        },
    }


@dataclass(frozen=True, slots=True)
class ExportedColumns:
    """The columns of an exported model, read from `model.json` and its vocabularies.

    Attributes:
        file: name of the model's file.
        lists: indices of the categorical columns that have an input of their own.
    """

    file: str
    columns: ModelColumns
    lists: tuple[int, ...]

    @classmethod
    def read(cls, folder: Path) -> ExportedColumns:
        """Read the columns from the folder of a model; DataError if `export` has not written it."""
        try:
            text = read_text(folder, MODEL_FILE, MOST_JSON_BYTES, INSTEAD)
            return cls._of(folder, json.loads(text))
        except DataError:  # names the file
            raise
        except Exception as error:  # untrusted bytes may make a library raise anything
            reason = (str(error).splitlines() or [""])[0]
            raise DataError(
                f"{folder / MODEL_FILE}: it, or a vocabulary that it names, is not as `export` "
                f"writes it: {type(error).__name__}: {reason}"
            ) from error

    @classmethod
    def _of(cls, folder: Path, about: Any) -> ExportedColumns:
        """Parse the content of `model.json`; raises any error if it is damaged."""
        data, inputs = about["data"], about["inputs"]
        schema = adapter().validate_json(json.dumps(data["schema"]))
        columns = {column["name"]: column for item in inputs.values() for column in item["columns"]}
        places = {column.name: place for place, column in enumerate(schema.categorical)}
        lists = [item["columns"][0]["name"] for name, item in inputs.items() if name[:4] == "ids_"]
        dense = [columns[column.name] for column in schema.inputs]
        scales = [
            Scale(mean=float(column["mean"]), deviation=float(column["deviation"]))
            if "mean" in column
            else None
            for column in dense
        ]
        return cls(
            file=str(about.get("file")),
            columns=ModelColumns(
                schema,
                [_read(folder, columns[col.name], col) for col in schema.categorical],
                tuple(scales),
                int(data["max_ind_range"] or 0),
            ),
            lists=tuple(places[name] for name in lists),
        )


def _read(folder: Path, about: Mapping[str, Any], column: CategoricalColumn) -> Vocabulary:
    path, first_id = plain_file(folder, about["vocabulary"], INSTEAD), about["first_id"]
    if column.has_texts:
        keys: Any = json.loads(path.read_text(encoding="utf-8"))
        is_fine = isinstance(keys, list) and {*map(type, cast("list[Any]", keys))} <= {str}
    else:
        keys = np.load(path)
        is_fine = keys.ndim == 1 and keys.dtype.kind in "iu"
    if not is_fine or first_id not in (0, 1):
        raise ValueError(f"{path}: not the categories of {column.name!r}")
    return Vocabulary(column, cast(Keys, keys), first_id)


@final
class ModelInputs:
    """Makes the named inputs of `model.onnx` or `model.pt2` from rows of raw values.

    Args:
        folder: folder with `model.json` and the vocabularies that it names.
        extra: whether columns that the schema does not name are an `error`, or ignored.

    Raises:
        DataError: a file is missing or damaged; or the folder has weights with expanded columns
            (`expand_to`) instead of a graph.
    """

    def __init__(self, folder: str | Path, *, extra: Extra = "error") -> None:
        exported = ExportedColumns.read(Path(folder))
        schema = exported.columns.schema
        if bags := [schema.categorical[k].name for k in exported.lists if k in schema.expanded]:
            raise DataError(
                f"{folder}: the ids of {', '.join(bags)} stand for bags "
                "(expand_to), which only export.format=onnx and pt2 have in their tables"
            )
        self._extra: Extra = extra
        self._schema = schema.for_scoring
        self._missing = frozenset(schema.missing_values)
        self._lists = ListInputs(exported.lists, weighted=schema.weighted)
        self._encoder = Encoder(exported.columns, "error")

    def __call__(self, rows: Sequence[Row]) -> dict[str, npt.NDArray[Any]]:
        """Inputs by name: `dense` float32 (B, I), `ids` int64 (B, S), lists int64 (B, L) each.

        Raises:
            DataError: a column is missing or unknown, a value is invalid, or a category has no row;
                names row, from 1, and column.
        """
        if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise DataError(f"{rows!r:.60} is not a list of rows")
        self._check_columns(rows)
        try:
            values = self._values(rows)
            arrays = self._encoder.dense(values), self._encoder.bags(values)
            inputs = inputs_of(*arrays, self._lists)
        except RefusedValueError as error:
            raise DataError(f"row {error.row + 1}: {error.reason}") from None
        return {name: np.ascontiguousarray(array) for name, array in inputs.items()}

    def _check_columns(self, rows: Sequence[Row]) -> None:
        fine: set[tuple[str, ...]] = set()  # most rows have the same columns
        for at, row in enumerate(rows, 1):
            if not isinstance(row, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise DataError(f"row {at}: {row!r:.60} is not an object of values by column")
            names = tuple(row)
            if names in fine:
                continue
            if fault := self._schema.columns_fault(names, self._extra):
                raise DataError(f"row {at}: {fault}")
            fine.add(names)

    def _values(self, rows: Sequence[Row]) -> Values:
        schema, numbers = self._schema, np.arange(1, len(rows) + 1)
        dense = [self._dense(rows, column) for column in schema.dense]
        return Values(
            row_N=numbers,
            label_N=None,
            dense_NI=np.concatenate(dense, 1) if dense else np.empty((len(rows), 0)),
            categories=tuple(self._coded(rows, column) for column in schema.categorical),
        )

    def _column(self, rows: Sequence[Row], name: str) -> list[Any]:
        """The values of a column, and its default in the schema for rows without it."""
        return [
            plain_value(row[name] if name in row else self._schema.defaults[name], self._missing)
            for row in rows
        ]

    def _coded(self, rows: Sequence[Row], column: CategoricalColumn) -> Coded:
        values, length_B, weight_M = self._column(rows, column.name), None, None
        row_M: Sequence[int] = range(len(rows))
        if column.max_length > 1:
            lists = [self._items(*pair, column, column.name) for pair in enumerate(values)]
            places = [self._kept(row, items, column) for row, items in enumerate(lists)]
            if column.weights is not None:
                weight_M = self._weights(rows, column, lists, places)
            length_B = np.array([*map(len, places)], np.int32)
            row_M = np.repeat(np.arange(len(rows)), length_B).tolist()
            values = [items[k] for items, ks in zip(lists, places, strict=True) for k in ks]
        keys, faults = keys_of(values, column)
        for place, reason in faults.items():
            raise RefusedValueError(row_M[place], column.name, reason)
        return Coded(np.arange(len(keys), dtype=np.int32), keys, length_B, weight_M)

    def _weights(
        self,
        rows: Sequence[Row],
        column: CategoricalColumn,
        lists: Sequence[Sequence[Any]],
        places: Sequence[Sequence[int]],
    ) -> Float32s:
        """The weights of the ids in the kept places of lists."""
        weights, name = list[float](), column.weights or ""
        for row, value in enumerate(self._column(rows, name)):
            items = self._items(row, value, column, name)
            if len(items) != len(lists[row]):
                reason = f"{len(items)} weights for {len(lists[row])} values of {column.name!r}"
                raise RefusedValueError(row, name, reason)
            weights += (_weight(items[place], row, name) for place in places[row])
        return np.array(weights, np.float32)

    def _items(
        self, row: int, value: Any, column: CategoricalColumn | DenseColumn, name: str
    ) -> list[Any]:
        """Values of a row in a column of lists, from a list or from text with the separator."""
        if is_missing(value):
            value = ()
        elif isinstance(value, str) and column.separator is not None:
            try:
                value = split_list(value, column.separator)
            except ValueError as error:
                raise RefusedValueError(row, name, f"{shown(value)} {error}") from None
        elif not isinstance(value, (list, tuple, np.ndarray)):
            raise RefusedValueError(row, name, f"{shown(value)} is no list")
        return [plain_value(item, self._missing) for item in cast("Sequence[Any]", value)]

    def _kept(self, row: int, items: Sequence[Any], column: CategoricalColumn) -> list[int]:
        """Places of the values that `truncate` keeps and that are not missing."""
        most, places = column.max_length, range(len(items))
        if len(items) > most and column.truncate == "error":
            reason = f"{len(items)} values, max_length = {most}"
            raise RefusedValueError(row, column.name, reason)
        places = places[-most:] if column.truncate == "last" else places[:most]
        return [place for place in places if not is_missing(items[place])]

    def _dense(self, rows: Sequence[Row], column: DenseColumn) -> Float64s:
        """The numbers of a column (B, length)."""
        values, length = self._column(rows, column.name), column.length
        if length > 1:
            lists = [self._vector(row, value, column) for row, value in enumerate(values)]
            values = [item for items in lists for item in items]
        x_M = np.empty(len(values))
        for at, value in enumerate(values):
            try:
                x_M[at] = number(value)
            except ValueError as error:
                reason = f"{shown(value)} {error}"
                raise RefusedValueError(at // length, column.name, reason) from None
        x_M, faults = transformed(x_M, column)
        for at, reason in sorted(faults.items()):
            raise RefusedValueError(at // length, column.name, f"{shown(values[at])} {reason}")
        return x_M.reshape(-1, length)

    def _vector(self, row: int, value: Any, column: DenseColumn) -> list[Any]:
        """The numbers of a row's list; those of a missing list are missing."""
        items = [None] * column.length
        if not is_missing(value):
            items = self._items(row, value, column, column.name)
        if len(items) != column.length:
            reason = f"{len(items)} numbers instead of {column.length}"
            raise RefusedValueError(row, column.name, reason)
        return items


def _weight(value: Any, row: int, name: str) -> float:
    try:
        with np.errstate(over="ignore"):
            weight = float(np.float32(number(value)))
    except ValueError as error:
        raise RefusedValueError(row, name, f"{shown(value)} {error}") from None
    if not math.isfinite(weight):
        reason = "a weight is empty" if is_missing(value) else f"{shown(value)} is no finite weight"
        raise RefusedValueError(row, name, reason)
    return weight
