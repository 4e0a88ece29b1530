"""The vocabularies that `export` has written beside weights, held against those of other rows.

The rows of a table follow the vocabulary of its column. Where other rows number the same
categories in another order, the rows of the tables are taken in that order.

Shapes: R rows of a table here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER
from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.data.sources.keys import Key
from dlrm_hybrid.disk import plain_file, read_object
from dlrm_hybrid.export.plain import list_name
from dlrm_hybrid.saved import vocabularies
from dlrm_hybrid.types import DataError

MODEL_FILE = "model.json"
SAME = ("name", "kind", "hash_size", "bucket", "missing")  # of a column, here and there


@dataclass(frozen=True, slots=True)
class Beside:
    """What a column of a file of weights has in its table.

    Attributes:
        column: what `model.json` says of it.
        row_of: the row of each category.
        rows: of the table.
    """

    column: Mapping[str, Any]
    row_of: Mapping[Key, int]
    rows: int


def beside(file: Path, preprocessing: Preprocessing) -> list[Beside] | None:
    """The columns of a file of weights in the order of its tables, if `export` has written it.

    Args:
        file: of the weights.
        preprocessing: of the rows that the weights are for.

    Raises:
        DataError: what lies beside it is none of that, or columns differ from those of the rows.
    """
    folder = file.parent
    if not (folder / MODEL_FILE).exists():
        return None
    about = read_object(folder, MODEL_FILE)
    if about.get("file") != file.name:
        raise DataError(
            f"{folder / MODEL_FILE}: is of {about.get('file')!s:.80}, not of {file.name}, so the "
            "categories of its rows are not known; give it its name again, or a folder of its own"
        )
    try:
        faults = list(_column_faults(about, preprocessing))
        if not faults:
            return [
                _of_column(folder, number, column)
                for number, column in enumerate(_columns(about, preprocessing), 1)
            ]
    except (AttributeError, KeyError, IndexError, TypeError, ValueError, OSError) as error:
        raise DataError(f"{folder / MODEL_FILE}: is not as export writes it: {error!r}") from error
    raise _refusal(file, preprocessing, faults)


def rows_there(
    file: Path, columns: list[Beside], preprocessing: Preprocessing
) -> list[npt.NDArray[np.int64]]:
    """For each table the row (R,) of the file that belongs to each row here.

    Raises:
        DataError: the file has no row for a category.
    """
    found: list[npt.NDArray[np.int64]] = []
    faults: list[str] = []
    for one, own in zip(columns, vocabularies.read(preprocessing), strict=True):
        keys: list[Key] = [*np.asarray(own.keys, object)]
        unknown = [key for key in keys if key not in one.row_of]
        if unknown:
            faults.append(
                f"{own.column.name}: {len(unknown):,} of {len(keys):,} categories are not in the "
                f"file's vocabulary, first {unknown[0]!r:.60}"
            )
        elif own.first_id > one.column["first_id"]:
            faults.append(f"{own.column.name}: the file has no row for all other categories")
        shared = [0] * own.first_id
        found.append(np.array([*shared, *(one.row_of.get(key, 0) for key in keys)], np.int64))
    if faults:
        raise _refusal(file, preprocessing, faults)
    return found


def _columns(about: Mapping[str, Any], preprocessing: Preprocessing) -> list[Mapping[str, Any]]:
    """Of each categorical column what `model.json` says, in the order of the tables."""
    inputs, lists = about["inputs"], preprocessing.schema.multi_hot
    single = iter(inputs["ids"]["columns"])
    expanded = preprocessing.schema.expanded
    return [
        inputs[list_name(number)]["columns"][0]
        if number in lists or number in expanded
        else next(single)
        for number in range(len(preprocessing.schema.categorical))
    ]


def _column_faults(about: Mapping[str, Any], preprocessing: Preprocessing) -> Iterator[str]:
    """What `model.json` says otherwise than the rows, but for categories."""
    theirs = about["inputs"].get("dense", {"columns": []})["columns"]
    ours = vocabularies.dense_columns(preprocessing)
    if len(theirs) != len(ours):
        yield f"{len(theirs)} dense columns, here {len(ours)}"
    for one, own in zip(theirs, ours, strict=False):
        if one != own:
            yield f"dense column {one}, here {own}"
    modulo = preprocessing.manifest.semantics.max_ind_range
    if about["data"]["max_ind_range"] != modulo:
        yield f"max_ind_range {about['data']['max_ind_range']}, here {modulo}"
    columns = preprocessing.schema.categorical
    if sum(len(one["columns"]) for one in about["inputs"].values()) - len(theirs) != len(columns):
        yield f"other categorical columns than the {len(columns)} here"
        return
    for one, own in zip(_columns(about, preprocessing), columns, strict=True):
        for key in SAME:
            if one[key] != getattr(own, key):
                yield f"column {one['name']}: {key} {one[key]!r}, here {getattr(own, key)!r}"


def _of_column(folder: Path, number: int, column: Mapping[str, Any]) -> Beside:
    is_text = column["kind"] == "string" and not column["hash_size"]
    name = f"{number}.{'json' if is_text else 'npy'}"
    path = plain_file(folder / VOCABULARY_FOLDER, name)
    if is_text:
        keys: list[Key] = json.loads(path.read_text(encoding="utf-8"))
    else:
        keys = np.load(path, allow_pickle=False).tolist()
    first_id = column["first_id"]
    row_of = {key: first_id + place for place, key in enumerate(keys)}
    return Beside(column, row_of, len(keys) + first_id)


def _refusal(file: Path, preprocessing: Preprocessing, faults: list[str]) -> DataError:
    lines = "".join(f"\n  {fault}" for fault in faults)
    return DataError(
        f"{file}: the columns that {MODEL_FILE} beside it has are not those of "
        f"{preprocessing.folder} (import.file){lines}"
    )
