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
from dlrm_hybrid.data.sources.cells import MISSING_INTEGER, Key, missing_key
from dlrm_hybrid.data.sources.values import Coded
from dlrm_hybrid.types import DataError

Int64s = npt.NDArray[np.int64]
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
        positions = _by_appearance(coded)
        number_D[positions] = [numbers.setdefault(keys[one], len(numbers)) for one in positions]
        if len(numbers) > _MAX_CATEGORIES:
            raise DataError(f"more than {_MAX_CATEGORIES} categories in one column")
        if len(numbers) > len(self._counts):
            self._counts = np.concatenate([self._counts, np.zeros(len(numbers), np.int64)])
        np.add.at(self._counts, number_D, np.bincount(seen, minlength=len(keys)))
        return number_D[coded.index_M].astype(np.int32)

    def vocabulary(
        self, column: CategoricalColumn, shared: bool
    ) -> tuple[Sequence[Key] | Int64s, npt.NDArray[np.int32]]:
        """The categories that get rows of the table, and the id of each number.

        Those are the ones with enough known ids and, behind them, all other buckets of a hashed
        column: every value is in one of them, whatever rows were there to see.

        Args:
            column: what the schema says of it.
            shared: whether id 0 is for all others.
        """
        kept_V = self._counts[: len(self._numbers)] >= max(1, column.min_count)
        if column.missing == "shared" and (key := missing_key(column)) in self._numbers:
            kept_V[self._numbers[key]] = False
        id_V = (np.cumsum(kept_V) - 1 + shared) * kept_V
        keys = [key for key, kept in zip(self._numbers, kept_V.tolist(), strict=True) if kept]
        if not column.hash_size or column.min_count > 1:
            return keys, id_V.astype(np.int32)
        missing = column.hash_size  # its place, behind the buckets
        seen_V = np.array(list(self._numbers), np.int64)
        place_V = np.where(seen_V == MISSING_INTEGER, missing, seen_V)
        is_new = np.arange(missing + 1) < missing + (column.missing == "own")
        is_new[place_V[kept_V]] = False
        new = np.flatnonzero(is_new)
        id_of_place = np.zeros(missing + 1, np.int64)
        id_of_place[new] = np.arange(len(new)) + len(keys) + shared
        new_keys = np.where(new == missing, MISSING_INTEGER, new)
        id_V = np.where(kept_V, id_V, id_of_place[place_V])
        return np.concatenate([np.array(keys, np.int64), new_keys]), id_V.astype(np.int32)


def _by_appearance(coded: Coded) -> list[int]:
    """The keys that occur, in the order of their first ids; those of Arrow may be in any."""
    nowhere = len(coded.index_M)
    first_D = np.full(len(coded.keys), nowhere)
    first_D[coded.index_M[::-1]] = np.arange(nowhere - 1, -1, -1)  # the last one to write is first
    order_D = np.argsort(first_D, kind="stable")
    return order_D[: int(np.count_nonzero(first_D < nowhere))].tolist()


def write_vocabulary(
    folder: Path, number: int, keys: Sequence[Key] | Int64s, column: CategoricalColumn
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


def read_vocabulary(
    folder: Path, number: int, column: CategoricalColumn
) -> list[str] | npt.NDArray[Any]:
    """The categories of column `number`, from 1, in the order of their ids: texts, or numbers.

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
            return content
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
    """Dense values as a model takes them: (x - mean) / deviation where a column has these.

    A value that 32 bits do not hold becomes infinite.
    """
    means = np.array([0.0 if one is None else one.mean for one in scales])
    deviations = np.array([1.0 if one is None else one.deviation for one in scales])
    with np.errstate(over="ignore"):  # the caller sees what has become infinite
        return ((dense_NI - means) / deviations).astype(np.float32)
