"""The categories of prepared rows as arrays that numpy opens; columns as `model.json` has them.

Shapes: V categories of a column, in the order of their ids.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.data.arrays import HEADER_BYTES
from dlrm_hybrid.data.encode import read_vocabulary
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER
from dlrm_hybrid.data.preprocessing import Preprocessing
from dlrm_hybrid.data.schema import CategoricalColumn
from dlrm_hybrid.data.shards import DAMAGED
from dlrm_hybrid.disk import plain_file
from dlrm_hybrid.types import DataError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The categories of one column.

    Attributes:
        column: what the schema says of it.
        keys: as they were read, by id: texts, or an array of uint32 for Criteo's hashes and of
            int64 for other numbers.
        first_id: 1 where id 0 stands for all others, else 0.
    """

    column: CategoricalColumn
    keys: npt.NDArray[Any] | Sequence[str]
    first_id: int

    @property
    def table_rows(self) -> int:
        """Rows of its table."""
        return len(self.keys) + self.first_id

    @property
    def is_text(self) -> bool:
        """Whether its keys are texts."""
        return self.column.kind == "string" and not self.column.hash_size

    @property
    def is_hash8(self) -> bool:
        """Whether its keys are Criteo's hashes."""
        return self.column.kind == "hash8" and not self.column.hash_size


def read(preprocessing: Preprocessing) -> list[Vocabulary]:
    """The vocabularies that rows were prepared with.

    Raises:
        DataError: a file is missing, or is not what `prepare` wrote.
    """
    folder, manifest = preprocessing.folder / VOCABULARY_FOLDER, preprocessing.manifest
    digests: list[bytes] = []
    found: list[Vocabulary] = []
    columns = zip(manifest.schema.categorical, manifest.out_of_vocabulary, strict=True)
    for number, (column, shared) in enumerate(columns, 1):
        is_text = column.kind == "string" and not column.hash_size
        names = [f"{number}.npy", f"{number}.offsets.npy"][: 1 + is_text]
        try:
            contents = [plain_file(folder, name).read_bytes()[HEADER_BYTES:] for name in names]
        except OSError as error:
            raise DataError(
                f"{error.filename}: cannot be read: {error.strerror}; {DAMAGED}"
            ) from error
        digests.append(xxhash.xxh3_128_digest(b"".join(contents)))
        if column.kind == "hash8" and not column.hash_size:
            keys: npt.NDArray[Any] | Sequence[str] = np.frombuffer(contents[0], "<u4")
        else:
            keys = read_vocabulary(folder, number, column)
        found.append(Vocabulary(column, keys, int(shared)))
    if xxhash.xxh3_128_hexdigest(b"".join(digests)) != manifest.vocabulary_xxh3:
        raise DataError(f"{folder}: does not match manifest.json; {DAMAGED}")
    return found


def write(folder: Path, vocabularies: list[Vocabulary]) -> list[dict[str, Any]]:
    """Write `vocabulary/1.npy`, of texts `1.json`; returns what `model.json` says of each column.

    Raises:
        OSError: they cannot be written.
    """
    (folder / VOCABULARY_FOLDER).mkdir()
    columns: list[dict[str, Any]] = []
    for number, one in enumerate(vocabularies, 1):
        file = f"{VOCABULARY_FOLDER}/{number}.{'json' if one.is_text else 'npy'}"
        if one.is_text:
            (folder / file).write_text(json.dumps(list(one.keys)), encoding="utf-8")
        else:
            np.save(folder / file, np.array(one.keys, "<u4" if one.is_hash8 else "<i8"))
        columns.append(
            {
                "name": one.column.name,
                "kind": one.column.kind,
                "hash_size": one.column.hash_size,
                "bucket": one.column.bucket,
                "missing": one.column.missing,
                "separator": one.column.separator,
                "vocabulary": file,
                "first_id": one.first_id,
                "rows": one.table_rows,
            }
            | (_of_lists(one.column) if one.column.max_length > 1 else {})
            | ({} if one.column.default is None else {"default": one.column.default})
            | ({"expand_to": one.column.expand_to} if one.column.expand_to > 1 else {})
        )
    return columns


def _of_lists(column: CategoricalColumn) -> dict[str, Any]:
    return {"max_length": column.max_length, "truncate": column.truncate}


def dense_columns(preprocessing: Preprocessing) -> list[dict[str, Any]]:
    """What `model.json` says of the dense columns; scales are of those that are standardised."""
    scales = zip(preprocessing.schema.dense, preprocessing.manifest.scales, strict=True)
    return [
        {"name": one.name, "transform": one.transform, "missing": one.missing}
        | ({} if one.default is None else {"default": one.default})
        | ({} if scale is None else {"mean": scale.mean, "deviation": scale.deviation})
        for one, scale in scales
    ]
