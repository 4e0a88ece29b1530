"""The categories of prepared rows as arrays that numpy opens; columns as `model.json` has them.

Shapes: V categories of a column, in the order of their ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.data.arrays import HEADER_BYTES
from dlrm_hybrid.data.manifest import VOCABULARY_FOLDER
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.data.shards import DAMAGED, Shards
from dlrm_hybrid.types import DataError


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The categories of one column.

    Attributes:
        column: its name.
        keys_V: as they were read, by id.
        first_id: 1 where id 0 stands for all others, else 0.
    """

    column: str
    keys_V: npt.NDArray[np.uint32]
    first_id: int

    @property
    def table_rows(self) -> int:
        """Rows of its table."""
        return len(self.keys_V) + self.first_id


def read(shards: Shards) -> list[Vocabulary]:
    """The vocabularies that rows were prepared with.

    Raises:
        DataError: a file is missing, or is not what `prepare` wrote.
    """
    folder, manifest = shards.folder / VOCABULARY_FOLDER, shards.manifest
    columns = manifest.schema.categorical
    files = [folder / f"{number}.npy" for number in range(1, len(columns) + 1)]
    try:
        contents = [path.read_bytes()[HEADER_BYTES:] for path in files]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}; {DAMAGED}") from error
    digests = b"".join(xxhash.xxh3_128_digest(content) for content in contents)
    if xxhash.xxh3_128_hexdigest(digests) != manifest.vocabulary_xxh3:
        raise DataError(f"{folder}: does not match manifest.json; {DAMAGED}")
    return [
        Vocabulary(column.name, np.frombuffer(content, "<u4"), int(shared))
        for column, content, shared in zip(
            columns, contents, manifest.out_of_vocabulary, strict=True
        )
    ]


def write(folder: Path, vocabularies: list[Vocabulary]) -> list[dict[str, Any]]:
    """Write `vocabulary/1.npy` …; returns what `model.json` says of each column.

    Raises:
        OSError: they cannot be written.
    """
    (folder / VOCABULARY_FOLDER).mkdir()
    columns: list[dict[str, Any]] = []
    for number, one in enumerate(vocabularies, 1):
        file = f"{VOCABULARY_FOLDER}/{number}.npy"
        np.save(folder / file, one.keys_V)
        rows = {"first_id": one.first_id, "rows": one.table_rows}
        columns.append({"name": one.column, "vocabulary": file, **rows})
    return columns


def dense_columns(schema: Schema) -> list[dict[str, str]]:
    """What `model.json` says of the dense columns."""
    return [{"name": column.name, "transform": column.transform} for column in schema.dense]
