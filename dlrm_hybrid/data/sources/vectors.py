"""Reads the vectors that rows of a table begin with, one a category, from Parquet or .npy.

Shapes: N rows of a block, V categories of a column, K of them that have a row, D numbers of a
vector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import numpy as np

from dlrm_hybrid.data.arrays import ArrayWriter
from dlrm_hybrid.data.manifest import FileStamp, Vectors, stamp, vectors_files
from dlrm_hybrid.data.preprocessing import NO_ROW, Vocabulary
from dlrm_hybrid.data.schema import CategoricalColumn, Dialect, some_names
from dlrm_hybrid.data.sources.arrow import ArrowError, is_list, pc
from dlrm_hybrid.data.sources.cells import shown
from dlrm_hybrid.data.sources.columns import Coded
from dlrm_hybrid.data.sources.files import Block, TableSource, open_source
from dlrm_hybrid.data.sources.values import coded_of, lists_of_numbers
from dlrm_hybrid.types import DataError


@final
@dataclass(frozen=True, slots=True)
class VectorFile:
    """The file that `vectors` of a categorical column names.

    Attributes:
        number: index of the column among the categorical ones.
        name: its column of lists.
        width: D.
        before: the file's stamp before it is read.
    """

    number: int
    column: CategoricalColumn
    key: str
    source: TableSource
    name: str
    width: int
    before: FileStamp

    @classmethod
    def open(cls, number: int, column: CategoricalColumn) -> Self:
        """Open the file; raises DataError if it has not a list of numbers for each category."""
        key, path = f"categorical[{number}].vectors, data.schema", Path(column.vectors or "")
        before = stamp(path, key)
        source = open_source(path, Dialect(), 1 << 16, lambda piece: None, key)
        if source.is_text:
            raise DataError(f"{path}: text; vectors are read from Parquet or .npy ({key})")
        if column.name not in source.names:
            raise DataError(f"{path}: no column {column.name!r}: {_has(source)} ({key})")
        names = [name for name in source.names if name != column.name]
        block = next(source.blocks(names), None) if names else None
        arrays = {} if block is None else {name: block.columns.column(name) for name in names}
        lists = {name: array for name, array in arrays.items() if is_list(array.type)}
        if len(lists) != 1:
            reason = f"{some_names([*lists])} are lists" if lists else "no column of lists"
            raise DataError(f"{path}: {reason}: wants one, of numbers; {_has(source)} ({key})")
        ((name, array),) = lists.items()
        width = pc.list_value_length(array)[0].as_py()
        if not width:
            raise DataError(f"{path}: row 1: column {name!r}: no numbers ({key})")
        if column.embedding_dim not in (None, width):
            other = f"categorical[{number}].embedding_dim = {column.embedding_dim}"
            raise DataError(f"{path}: column {name!r}: vectors of {width} numbers, {other} ({key})")
        return cls(number, column, key, source, name, width, before)

    def write(self, folder: Path, vocabulary: Vocabulary) -> Vectors:
        """Write the vectors of the categories that have a row.

        Raises:
            DataError: a vector is of another width or not finite, or a category is there twice, or
                none; names file, row, column and key.
        """
        find, row_of_V = vocabulary.lookup(), np.zeros(vocabulary.table_rows, np.int64)
        files, count = vectors_files(self.number), 0
        with (
            ArrayWriter(folder / files[0], np.int32) as ids,
            ArrayWriter(folder / files[1], np.float32, self.width) as values,
        ):
            for block in self.source.blocks([self.column.name, self.name]):
                coded: Coded = self._read(block, self.column.name, coded_of, self.column)
                x_ND = self._read(block, self.name, lists_of_numbers, self.width)
                with np.errstate(over="ignore"):
                    x_ND = x_ND.astype(np.float32)
                for at in np.flatnonzero(~np.isfinite(x_ND).all(1))[:1].tolist():
                    self._refuse(block, at, self.name, "a number is missing, or not of 32 bits")
                ids_N = find(coded.keys)[coded.index_M]
                known_N = np.flatnonzero(ids_N != NO_ROW)
                ids_K, row_K = ids_N[known_N], block.row_N[known_N]
                firsts, at_K = np.unique(ids_K, return_index=True)
                row_of_V[firsts] = np.where(row_of_V[firsts], row_of_V[firsts], row_K[at_K])
                for at in known_N[row_of_V[ids_K] != row_K][:1].tolist():
                    category = shown(coded.keys[int(coded.index_M[at])])
                    reason = f"{category} is in row {row_of_V[ids_N[at]]} too"
                    self._refuse(block, at, self.column.name, reason)
                ids.append(ids_K.astype(np.int32))
                values.append(np.ascontiguousarray(x_ND[known_N]))
                count += len(ids_N)
            if stamp(Path(self._path), self.key) != self.before:
                raise DataError(f"{self._path}: changed while it was read ({self.key})")
            return Vectors(
                column=self.number,
                stamp=self.before,
                categories=count,
                ids=ids.finish(),
                values=values.finish(),
            )

    @property
    def _path(self) -> str:
        return self.column.vectors or ""

    def _read(self, block: Block, name: str, read: Callable[[Any, Any], Any], expected: Any) -> Any:
        array = block.columns.column(name)
        try:
            values, bad = read(array, expected)
        except ArrowError as error:
            reason = f"column {name!r}: {array.type}: {str(error).splitlines()[0]}"
            raise DataError(f"{self._path}: {reason} ({self.key})") from error
        for at in sorted(bad)[:1]:
            self._refuse(block, at, name, bad[at])
        return values

    def _refuse(self, block: Block, at: int, name: str, reason: str) -> None:
        where = f"{self._path}: row {block.row_N[at]}: column {name!r}"
        raise DataError(f"{where}: {reason} ({self.key})")


def _has(source: TableSource) -> str:
    return f"it has {some_names(source.names)}"
