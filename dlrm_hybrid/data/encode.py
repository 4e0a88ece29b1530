"""Vocabularies of tables: numbered while rows are prepared, stored as .npy, read afterwards.

`vocabulary/<n>.npy` has the categories of categorical column n, from 1, in the order of their ids,
without one for a shared id 0: text as UTF-8 bytes, concatenated, with `<n>.offsets.npy` (V + 1)
that says where each begins; whole numbers, and hashes, as int64; `hash8` as uint32. A missing value
is the empty text, -2**63 or 0.

Shapes: N rows, V categories of a column, D distinct ones of a block, F categorical columns, M ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid import disk
from dlrm_hybrid.data.arrays import header
from dlrm_hybrid.data.manifest import Scale
from dlrm_hybrid.data.schema import CategoricalColumn
from dlrm_hybrid.data.sources.keys import Key
from dlrm_hybrid.data.sources.values import Coded
from dlrm_hybrid.types import DataError

_MAX_CATEGORIES = 2**31 - 2


@final
class Numbers:
    """Numbers the categories of a column by first appearance, and counts the known rows' ones."""

    def __init__(self) -> None:
        self._numbers: dict[Key, int] = {}
        self._counts = np.zeros(1 << 10, np.int64)

    def add(self, coded: Coded, known_M: npt.NDArray[np.bool_] | None) -> npt.NDArray[np.int32]:
        """The number of each id; `known_M` says which ones count, None: all."""
        numbers, keys = self._numbers, coded.keys
        seen = coded.index_M if known_M is None else coded.index_M[known_M]
        number_D = np.zeros(len(keys), np.int64)
        for position in _by_appearance(coded):
            number_D[position] = numbers.setdefault(keys[position], len(numbers))
        if len(numbers) > _MAX_CATEGORIES:
            raise DataError(f"more than {_MAX_CATEGORIES} categories in one column")
        if len(numbers) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(len(numbers), np.int64)])
        np.add.at(self._counts, number_D, np.bincount(seen, minlength=len(keys)))
        return number_D[coded.index_M].astype(np.int32)

    def vocabulary(
        self, least: int, shared: bool, without: Key | None = None
    ) -> tuple[list[Key], npt.NDArray[np.int32]]:
        """The categories with at least so many known ids, and the id of each number.

        Args:
            least: times that a category must have been counted.
            shared: whether id 0 is for all others.
            without: a category that is one of the others however often it is.
        """
        kept_V = self._counts[: len(self._numbers)] >= least
        if without in self._numbers:
            kept_V[self._numbers[without]] = False
        id_V = (np.cumsum(kept_V) - 1 + shared) * kept_V
        keys = [key for key, kept in zip(self._numbers, kept_V.tolist(), strict=True) if kept]
        return keys, id_V.astype(np.int32)


def _by_appearance(coded: Coded) -> list[int]:
    """The keys that occur, in the order of their first ids; those of Arrow may be in any."""
    nowhere = len(coded.index_M)
    first_D = np.full(len(coded.keys), nowhere)
    first_D[coded.index_M[::-1]] = np.arange(nowhere - 1, -1, -1)  # the last one to write is first
    order_D = np.argsort(first_D, kind="stable")
    return order_D[: int(np.count_nonzero(first_D < nowhere))].tolist()


def write_vocabulary(
    folder: Path, number: int, keys: Sequence[Key], column: CategoricalColumn
) -> bytes:
    """Write the categories of column `number`, from 1; the xxh3-128 of what the files hold."""
    arrays: dict[str, npt.NDArray[Any]]
    if column.hash_size or column.kind != "string":
        kind = np.uint32 if column.kind == "hash8" and not column.hash_size else np.int64
        arrays = {f"{number}.npy": np.array(keys, kind)}
    else:
        encoded = [str(key).encode() for key in keys]
        offsets = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(one) for one in encoded], out=offsets[1:])
        content = np.frombuffer(b"".join(encoded), np.uint8)
        arrays = {f"{number}.npy": content, f"{number}.offsets.npy": offsets}
    digest = xxhash.xxh3_128()
    for name, array in arrays.items():
        payload = array.reshape(-1).view(np.uint8).data
        digest.update(payload)
        disk.write(folder / name, [memoryview(header(array.dtype.str, array.shape)), payload])
    return digest.digest()


def read_vocabulary(folder: Path, number: int, column: CategoricalColumn) -> list[Key]:
    """The categories of column `number`, from 1, in the order of their ids.

    Args:
        folder: of the vocabularies.
        number: of the column.
        column: what the schema says of it.

    Raises:
        DataError: there are none, or they are damaged.
    """
    path = folder / f"{number}.npy"
    try:
        content = np.load(path, allow_pickle=False)
        if column.hash_size or column.kind != "string":
            return content.tolist()
        offsets = np.load(folder / f"{number}.offsets.npy", allow_pickle=False).tolist()
        text = content.tobytes()
        return [
            text[first:stop].decode() for first, stop in zip(offsets, offsets[1:], strict=False)
        ]
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: no vocabulary of {column.name!r}: {error}") from error


def standardised(
    dense_NI: npt.NDArray[np.float64], scales: Sequence[Scale | None]
) -> npt.NDArray[np.float32]:
    """Dense values as a model takes them: (x - mean) / deviation where a column has these."""
    means = np.array([0.0 if one is None else one.mean for one in scales])
    deviations = np.array([1.0 if one is None else one.deviation for one in scales])
    return ((dense_NI - means) / deviations).astype(np.float32)
