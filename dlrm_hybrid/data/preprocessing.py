"""Preprocessing of raw values, kept with each run and checkpoint: schema, vocabularies, scales.

Its folder holds the manifest of the prepared rows and their vocabularies, as hard links where the
file system has these. So a model can score new rows even when its training rows are gone.

`vocabulary/<n>.npy` has the categories of categorical column n, from 1, in the order of their ids,
none for a shared id 0: text as concatenated UTF-8 bytes, with `<n>.offsets.npy` (V + 1) for where
each begins; whole numbers and hashes as int64; `hash8` as uint32. A missing value is the empty
text, -2**63 or 0. A column with `evict` has its categories' `<n>.use.npy` too, int64. Of columns
with one table only the first has files.

Shapes: V categories of a column, D keys that are looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid import disk
from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags, expanded
from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.arrays import HEADER_BYTES, header
from dlrm_hybrid.data.manifest import MANIFEST_FILE, VOCABULARY_FOLDER, Manifest, Scale
from dlrm_hybrid.data.schema import CategoricalColumn, Schema
from dlrm_hybrid.data.sources.cells import Key
from dlrm_hybrid.rng import drawn, fold
from dlrm_hybrid.types import DataError

PREPROCESSING_FOLDER = "preprocessing"
DAMAGED = "the file was damaged or changed: prepare the rows again"
NO_ROW = -1
Keys = Sequence[Key] | npt.NDArray[Any]
Lookup = Callable[[Keys], Int64s]
"""Maps keys to their ids, and keys outside the vocabulary to `NO_ROW`."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The categories of one column.

    Attributes:
        keys: categories by id: texts, or an array of uint32 for Criteo's hashes and of int64 for
            other numbers.
        first_id: 1 if id 0 is all other categories, else 0.
        use_V: with `evict` the use of categories, which decides who keeps a row: times it was seen
            on all days (`rarest`), or the last day of it, the first being 1 (`least_recent`).
    """

    column: CategoricalColumn
    keys: Keys
    first_id: int
    use_V: Int64s | None = None

    @property
    def table_rows(self) -> int:
        """Number of rows that the column's table needs."""
        return len(self.keys) + self.first_id

    def having(self, taken_K: Int64s, keys: Keys) -> Vocabulary:
        """The vocabulary with other categories at K of its places, and more behind the last.

        Args:
            taken_K: the places, from 0.
            keys: K categories for these, then those behind.
        """
        replacements, additions = keys[: len(taken_K)], keys[len(taken_K) :]
        if self.column.has_texts:
            result: Any = [*self.keys, *additions]
            for place, key in zip(taken_K.tolist(), replacements, strict=True):
                result[place] = key
        else:
            result = np.concatenate([np.asarray(part, np.int64) for part in (self.keys, additions)])
            result[taken_K] = replacements
        return replace(self, keys=result, use_V=None)

    def since(self, earlier: Vocabulary) -> tuple[Int64s, Keys]:
        """The places and categories with which `having` turns an earlier vocabulary into this."""
        size = len(earlier.keys)
        if self.column.has_texts:
            texts, pairs = list(self.keys), zip(earlier.keys, self.keys, strict=False)
            taken_K = np.flatnonzero([old != new for old, new in pairs])
            return taken_K, [*(texts[place] for place in taken_K.tolist()), *texts[size:]]
        keys_V = np.asarray(self.keys, np.int64)
        overlap = min(size, len(keys_V))
        taken_K = np.flatnonzero(keys_V[:overlap] != np.asarray(earlier.keys, np.int64)[:overlap])
        return taken_K, np.concatenate([keys_V[taken_K], keys_V[size:]])

    def lookup(self) -> Lookup:
        """Build an index from categories to ids."""
        if self.column.has_texts:
            ids = {key: id for id, key in enumerate(self.keys, self.first_id)}
            return lambda keys: np.array([ids.get(key, NO_ROW) for key in keys], np.int64)
        if self.column.has_hashes:
            return self._lookup_of_hashes()
        known_V = np.asarray(self.keys, np.int64)
        order_V = np.argsort(known_V, kind="stable")
        sorted_V = np.append(known_V[order_V], 0)  # a place for keys above all others
        ids_V = np.append(order_V + self.first_id, NO_ROW)

        def find(keys: Keys) -> Int64s:
            keys_D = np.asarray(keys, np.int64)
            place_D = np.searchsorted(sorted_V[:-1], keys_D)
            return np.where(sorted_V[place_D] == keys_D, ids_V[place_D], NO_ROW)

        return find

    def _lookup_of_hashes(self) -> Lookup:
        """A compiled hash table, as Criteo's columns have millions of categories."""
        from dlrm_hybrid.data.sources.criteo_ids import KeyTable  # numba takes a while

        table = KeyTable()
        table.insert(np.array(self.keys, np.uint32), 0)

        def find(keys: Keys) -> Int64s:
            number_D = np.array(keys, np.uint32)
            table.lookup(number_D)  # 1 + number, 0 for unknown ones
            id_D = number_D.astype(np.int64) - 1 + self.first_id
            return np.where(number_D > 0, id_D, NO_ROW)

        return find


def write_vocabulary(
    folder: Path,
    number: int,
    keys: Keys,
    column: CategoricalColumn,
    use_V: Int64s | None = None,
) -> bytes:
    """Write the categories of column `number`, from 1; returns the xxh3-128 of the content."""
    arrays: dict[str, npt.NDArray[Any]]
    if column.has_texts:
        encoded = [str(key).encode() for key in keys]
        offsets = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(text) for text in encoded], out=offsets[1:])
        content = np.frombuffer(b"".join(encoded), np.uint8)
        arrays = {f"{number}.npy": content, f"{number}.offsets.npy": offsets}
    else:
        arrays = {f"{number}.npy": np.asarray(keys, column.key_type)}
    if use_V is not None:
        arrays[f"{number}.use.npy"] = use_V
    digest = xxhash.xxh3_128()
    for name, array in arrays.items():
        payload = array.reshape(-1).view(np.uint8).data
        digest.update(payload)
        disk.write(folder / name, [memoryview(header(array.dtype.str, array.shape)), payload])
    return digest.digest()


def _keys(contents: Sequence[bytes], column: CategoricalColumn) -> Keys:
    if not column.has_texts:
        return np.frombuffer(contents[0], column.key_type)
    text, offsets = contents[0], np.frombuffer(contents[1], "<i8").tolist()
    return [text[first:stop].decode() for first, stop in pairwise(offsets)]


@final
@dataclass(frozen=True, slots=True)
class ModelColumns:
    """The columns of a model's inputs, and what their raw values mean.

    Attributes:
        modulo: modulus of Criteo's hashes; 0 for none.
    """

    schema: Schema
    vocabularies: Sequence[Vocabulary]
    scales: tuple[Scale | None, ...]
    modulo: int

    def other_meaning(self, other: ModelColumns) -> list[str]:
        """Lines about what raw values mean there and not here, besides their categories."""
        lines = self.schema.other_meaning(other.schema)
        if self.scales != other.scales:
            lines.append("dense columns are standardised with other scales")
        if self.modulo != other.modulo:
            lines.append(f"max_ind_range is {self.modulo} and {other.modulo}")
        return lines


@final
@dataclass(frozen=True, slots=True)
class Preprocessing:
    """Preprocessing of raw values to inputs of a model: schema, vocabularies and scales.

    Attributes:
        folder: folder with the vocabularies.
        manifest: manifest of the prepared training rows.
    """

    folder: Path
    manifest: Manifest

    @property
    def schema(self) -> Schema:
        """The columns of the prepared rows, from their manifest."""
        return self.manifest.schema

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Number of rows that each embedding table needs."""
        return self.schema.by_table(self.manifest.table_rows)

    def vocabularies(self) -> list[Vocabulary]:
        """Read the vocabulary of each categorical column; raises DataError if one is damaged."""
        results: list[Vocabulary] = []
        for column, first, contents, is_shared in zip(
            self.schema.categorical,
            self.schema.first_columns,
            self.verified_vocabularies(),
            self.manifest.out_of_vocabulary,
            strict=True,
        ):
            if first < len(results):
                results.append(replace(results[first], column=column))
                continue
            use_V = None if column.evict is None else np.frombuffer(contents[-1], "<i8")
            results.append(Vocabulary(column, _keys(contents, column), int(is_shared), use_V))
        return results

    def columns(self) -> ModelColumns:
        """Read the columns with their vocabularies; raises like `vocabularies`."""
        modulo = self.manifest.semantics.max_ind_range or 0
        return ModelColumns(self.schema, self.vocabularies(), self.manifest.scales, modulo)

    def verified_vocabularies(self) -> list[list[bytes]]:
        """Content of each column's vocabulary files, verified; raises like `vocabularies`."""
        folder, firsts = self.folder / VOCABULARY_FOLDER, self.schema.first_columns
        files = {
            first: [f"{first + 1}.npy"]
            + [f"{first + 1}.offsets.npy"] * self.schema.categorical[first].has_texts
            + [f"{first + 1}.use.npy"] * (self.schema.categorical[first].evict is not None)
            for first in firsts
        }
        try:
            tables = {
                first: [disk.plain_file(folder, name).read_bytes()[HEADER_BYTES:] for name in names]
                for first, names in files.items()
            }
        except OSError as error:
            problem = f"{error.filename}: cannot be read: {error.strerror}"
            raise DataError(f"{problem}; {DAMAGED}") from error
        digests = {k: xxhash.xxh3_128_digest(b"".join(parts)) for k, parts in tables.items()}
        all_digests = b"".join(digests[first] for first in firsts)
        if xxhash.xxh3_128_hexdigest(all_digests) != self.manifest.vocabulary_xxh3:
            raise DataError(f"{folder}: does not match {MANIFEST_FILE}; {DAMAGED}")
        return [tables[first] for first in firsts]

    def replaced(self, base: Preprocessing) -> list[Int64s]:
        """Ids of each column that stand for another category than in its base, in order."""
        counts = () if self.manifest.base is None else self.manifest.base.growth
        if not any(growth.evicted for growth in counts):
            return [np.empty(0, np.int64) for _ in self.schema.categorical]
        pairs = zip(base.vocabularies(), self.vocabularies(), strict=True)
        return [new.since(old)[0] + new.first_id for old, new in pairs]

    def expanded(self, bags: Bags[Int64s]) -> Bags[Int64s]:
        """Expand the bags of the columns that have `expand_to` in the schema."""
        return expanded(bags, self.schema.expanded, self.bag_of)

    def bag_of(self, column: int, ids_B: Int64s) -> Int64s:
        """The bags of an expanded column's ids, int64 (B, size): equal for equal ids.

        The ids after it are drawn uniformly from the whole table as in MLPerf's DLRM v2, by a
        hash of column, id and position. An id without a row in the table is repeated.
        """
        size, rows = self.schema.categorical[column].expand_to, self.manifest.table_rows[column]
        positions_BS = (ids_B[:, None] << 16) | np.arange(size)
        ids_BS = drawn(fold(0, "bag", column), positions_BS.view(np.uint64), rows).view(np.int64)
        ids_BS[:, 0] = ids_B
        beyond_B = ids_B >= rows
        ids_BS[beyond_B] = ids_B[beyond_B, None]
        return ids_BS


def keep(rows: Path, folder: Path) -> None:
    """Make the folder `preprocessing` of a run or checkpoint; replaces an existing one.

    Args:
        rows: folder of prepared rows, or of a run, to take it from.

    Raises:
        OSError: it cannot be made.
    """
    source = rows / PREPROCESSING_FOLDER if (rows / PREPROCESSING_FOLDER).is_dir() else rows
    disk.link_files(source, folder / PREPROCESSING_FOLDER, (MANIFEST_FILE, VOCABULARY_FOLDER))


def read_kept(folder: Path) -> Preprocessing:
    """Read the preprocessing of a run or checkpoint; raises DataError if missing or damaged."""
    source = folder / PREPROCESSING_FOLDER
    for path in (source, source / VOCABULARY_FOLDER):
        if path.is_symlink():
            raise DataError(f"{path}: is a link, not the folder that a run makes")
    disk.plain_file(source, MANIFEST_FILE)
    return Preprocessing(source, manifests.read(source))
