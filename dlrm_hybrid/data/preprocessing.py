"""What becomes of raw values before a model gets them, kept with what was trained on them.

A run folder, and each of its checkpoints, has a folder of that: the manifest of the prepared rows
and their vocabularies, as hard links where the file system has these. So a model scores new rows
whatever has become of those that it was trained on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np

from dlrm_hybrid import disk
from dlrm_hybrid.bags import Bags, Int64s, expanded
from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.manifest import MANIFEST_FILE, VOCABULARY_FOLDER, Manifest
from dlrm_hybrid.data.schema import Schema
from dlrm_hybrid.rng import drawn, fold
from dlrm_hybrid.types import DataError

PREPROCESSING_FOLDER = "preprocessing"


@final
@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Schema, vocabularies and scales.

    Attributes:
        folder: with the vocabularies.
        manifest: of the rows that they were found in.
    """

    folder: Path
    manifest: Manifest

    @property
    def schema(self) -> Schema:
        """The columns."""
        return self.manifest.schema

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows that each embedding table needs."""
        return self.manifest.table_rows

    def expanded(self, bags: Bags[Int64s]) -> Bags[Int64s]:
        """The bags of rows with all ids of the columns that the schema expands."""
        return expanded(bags, self.schema.expanded, self.bag_of)

    def bag_of(self, column: int, ids_B: Int64s) -> Int64s:
        """The bags of ids of an expanded column, in all batches the same; int64 (B, size).

        After the id come others, each of the whole table with the same chance as in MLPerf's DLRM
        v2, by a hash of column, id and position. An id without a row in the table is repeated.
        """
        size, rows = self.schema.categorical[column].expand_to, self.table_rows[column]
        positions_BS = (ids_B[:, None] << 16) | np.arange(size)
        found = drawn(fold(0, "bag", column), positions_BS.view(np.uint64), rows).view(np.int64)
        found[:, 0] = ids_B
        beyond_B = ids_B >= rows
        found[beyond_B] = ids_B[beyond_B, None]
        return found


def keep(rows: Path, folder: Path) -> None:
    """Make the folder `preprocessing` of a run or checkpoint; one that is there is replaced.

    Args:
        rows: prepared rows, or a run.
        folder: of the run or checkpoint.

    Raises:
        OSError: it cannot be made.
    """
    source = rows / PREPROCESSING_FOLDER if (rows / PREPROCESSING_FOLDER).is_dir() else rows
    disk.link_files(source, folder / PREPROCESSING_FOLDER, (MANIFEST_FILE, VOCABULARY_FOLDER))


def read_kept(folder: Path) -> Preprocessing:
    """What a checkpoint has; no link out of it is followed.

    Raises:
        DataError: it has none, or it is damaged.
    """
    kept = folder / PREPROCESSING_FOLDER
    for path in (kept, kept / VOCABULARY_FOLDER):
        if path.is_symlink():
            raise DataError(f"{path}: is a link, not the folder that a run makes")
    disk.plain_file(kept, MANIFEST_FILE)
    return Preprocessing(kept, manifests.read(kept))
