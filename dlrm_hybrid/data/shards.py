"""A folder of prepared rows, opened for reading: checked, mapped, addressed by row, exported.

Rows are numbered across all days. Shapes: R rows, W = 40 words of a record,
F = 26 categorical features.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import xxhash

from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.format import (
    BLOCK_ROWS,
    COLUMN_FILES,
    FIRST_DENSE_WORD,
    FIRST_ID_WORD,
    NUM_CATEGORICAL,
    NUM_DENSE,
    RECORD_WORDS,
    VOCABULARY_FOLDER,
)
from dlrm_hybrid.data.manifest import Manifest, Semantics, Words
from dlrm_hybrid.types import ConfigError, DataError, ResourceError

SAMPLED_BLOCKS = 32
DAMAGED = "the file was damaged or changed: prepare the rows again"
_ONE = np.float32(1).view(np.uint32)
# In the order of a record's words. A dense column holds log(x + 1), not x: its name says so.
COLUMNS = (
    "label",
    *(f"I{i}_log1p" for i in range(1, NUM_DENSE + 1)),
    *(f"C{i}" for i in range(1, NUM_CATEGORICAL + 1)),
)
ROW_GROUP_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class Shards:
    """Prepared rows of a folder, mapped into memory day by day.

    Attributes:
        folder: that holds them.
        manifest: what the rows are.
        days_RW: uint32, read-only maps of the records, one per day.
        borders: first row of each day, then the number of all rows.
    """

    folder: Path
    manifest: Manifest
    days_RW: tuple[Words, ...]
    borders: tuple[int, ...]

    @property
    def table_rows(self) -> tuple[int, ...]:
        """Rows that each of the 26 embedding tables needs."""
        return self.manifest.table_rows

    @property
    def train_rows(self) -> range:
        """All days but the last."""
        return range(self.borders[-2])

    def test_rows(self, part: str) -> range:
        """The last day, or the half of it that facebookresearch/dlrm tests on.

        `first_half` has the middle row of an odd number, as np.array_split gives it.

        Raises:
            ValueError: `part` is neither `day` nor `first_half`.
        """
        start, stop = self.borders[-2:]
        if part == "day":
            return range(start, stop)
        if part == "first_half":
            return range(start, start + (stop - start + 1) // 2)
        raise ValueError(f"data.test_part is `day` or `first_half`, not {part!r}")

    def steps_per_epoch(self, batch_size: int, trainers: int) -> int:
        """Global batches of `trainers * batch_size` rows in the training rows.

        Raises:
            ConfigError: not even one.
        """
        rows, global_rows = len(self.train_rows), trainers * batch_size
        if rows < global_rows:
            raise ConfigError(
                f"train.batch_size = {batch_size}: a step of {trainers} trainer(s) takes "
                f"{global_rows:,} rows, but the training days of {self.folder} have only {rows:,}"
            )
        return rows // global_rows

    def pieces(self, rows: range) -> Iterator[Words]:
        """The records of consecutive rows as uint32 [·, W] views, one for each day they touch.

        Raises:
            IndexError: there are no such rows.
        """
        if rows.step != 1 or rows.start < 0 or rows.stop > self.borders[-1]:
            raise IndexError(f"{rows} is not a run of the {self.borders[-1]} rows")
        row = rows.start
        while row < rows.stop:
            day = bisect_right(self.borders, row) - 1
            stop = min(rows.stop, self.borders[day + 1])
            yield self.days_RW[day][row - self.borders[day] : stop - self.borders[day]]
            row = stop

    def fault(self, rows: Iterable[int]) -> DataError:
        """The error for the first of these rows that no model can be trained on."""
        for row in rows:
            day = bisect_right(self.borders, row) - 1
            at = row - self.borders[day]
            found = _first_fault(self.days_RW[day][at : at + 1], self.table_rows)
            if found is not None:
                path = self.folder / self.manifest.days[day].file
                return DataError(f"{path}: row {at:,} (counted from 0): {found[1]}; {DAMAGED}")
        return DataError(f"{self.folder}: rows changed while they were read; {DAMAGED}")


def _first_fault(records_RW: Words, table_rows: Sequence[int]) -> tuple[int, str] | None:
    """The first row that no model can be trained on, and why; None if all are fine.

    Args:
        records_RW: uint32, rows of a shard.
        table_rows: of each embedding table.
    """
    label_R = records_RW[:, 0]
    dense_RI = records_RW[:, FIRST_DENSE_WORD:FIRST_ID_WORD].view(np.float32)
    wrong_RW = np.zeros(records_RW.shape, np.bool_)
    wrong_RW[:, 0] = (label_R != 0) & (label_R != _ONE)
    wrong_RW[:, FIRST_DENSE_WORD:FIRST_ID_WORD] = ~np.isfinite(dense_RI)
    ids_RF = records_RW[:, FIRST_ID_WORD:]
    wrong_RW[:, FIRST_ID_WORD:] = ids_RF >= np.array(table_rows, np.uint32)
    indices = np.argwhere(wrong_RW)
    if not len(indices):
        return None
    row, word = (int(index) for index in indices[0])
    value = records_RW[row, word]
    if word == 0:
        return row, f"label {value.view(np.float32):g} is neither 0 nor 1"
    if word < FIRST_ID_WORD:
        return row, f"I{word} is {value.view(np.float32):g}"
    column = word - FIRST_ID_WORD
    return row, f"C{column + 1} is {value}, its table has {table_rows[column]} rows"


def open_shards(folder: Path, expected: Semantics | None) -> Shards:
    """Open prepared rows; sizes are checked, and the checksums of some blocks, others each time.

    Args:
        folder: what `prepare` wrote.
        expected: the options the rows must have been made with; None takes them as they are.

    Raises:
        DataError: no manifest, other options than expected, or a file is missing, cut or altered.
    """
    manifest = manifests.read(folder)
    if differences := [] if expected is None else manifest.semantics.differences(expected):
        raise DataError(
            f"{folder}: made with other options ({'; '.join(differences)});"
            " run `prepare` again or name another folder in data.prepared"
        )
    if fault := manifests.size_fault(folder, manifest):
        raise DataError(f"{fault}; {DAMAGED}")
    days_RW = tuple(_map(folder / shard.file, shard.rows) for shard in manifest.days)
    borders = [0]
    for shard in manifest.days:
        borders.append(borders[-1] + shard.rows)
    shards = Shards(folder, manifest, days_RW, tuple(borders))
    blocks = [
        (day, block)
        for day, shard in enumerate(manifest.days)
        for block in range(len(shard.blocks))
    ]
    # Others each time: damage is found sooner or later.
    sampled = np.random.default_rng().permutation(len(blocks))[:SAMPLED_BLOCKS]
    for index in np.sort(sampled):
        day, block = blocks[int(index)]
        _check_block(shards, day, block)
    return shards


def verify(shards: Shards, progress: Callable[[int], None]) -> None:
    """Read all files of a prepared folder and compare everything that the manifest says of them.

    Args:
        shards: the folder, opened.
        progress: called with the number of rows that have been read.

    Raises:
        DataError: the first row, block or file that is not what `prepare` wrote.
    """
    done = 0
    for day, shard in enumerate(shards.manifest.days):
        digest, clicks = xxhash.xxh3_128(), 0
        for block in range(len(shard.blocks)):
            records_RW = _check_block(shards, day, block)
            if (found := _first_fault(records_RW, shards.table_rows)) is not None:
                first = shards.borders[day] + block * BLOCK_ROWS
                raise shards.fault([first + found[0]])
            digest.update(records_RW.data)
            clicks += np.count_nonzero(records_RW[:, 0])
            done += len(records_RW)
            progress(done)
        if (digest.hexdigest(), clicks) != (shard.xxh3, shard.clicks):
            path = shards.folder / shard.file
            raise DataError(f"{path}: does not match manifest.json; {DAMAGED}")
    _check_vocabulary(shards)


def _check_block(shards: Shards, day: int, block: int) -> Words:
    first = block * BLOCK_ROWS
    records_RW = shards.days_RW[day][first : first + BLOCK_ROWS]
    shard = shards.manifest.days[day]
    if xxhash.xxh3_64_hexdigest(records_RW.data) != shard.blocks[block]:
        raise DataError(
            f"{shards.folder / shard.file}: rows {first:,} to {first + len(records_RW) - 1:,} "
            f"(counted from 0): checksum differs from manifest.json; {DAMAGED}"
        )
    return records_RW


def _check_vocabulary(shards: Shards) -> None:
    """The keys of all ids, where the folder has them."""
    manifest, folder = shards.manifest, shards.folder / VOCABULARY_FOLDER
    try:
        digests = [xxhash.xxh3_128_digest((folder / name).read_bytes()) for name in COLUMN_FILES]
    except OSError as error:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}; {DAMAGED}") from error
    if xxhash.xxh3_128_hexdigest(b"".join(digests)) != manifest.vocabulary_xxh3:
        raise DataError(f"{folder}: does not match manifest.json; {DAMAGED}")


def _map(path: Path, rows: int) -> Words:
    if rows == 0:  # an empty file cannot be mapped
        return np.empty((0, RECORD_WORDS), np.uint32)
    return np.asarray(np.memmap(path, np.uint32, mode="r", shape=(rows, RECORD_WORDS)))


def export_parquet(
    shards: Shards, folder: Path, progress: Callable[[int], None]
) -> tuple[Path, ...]:
    """Write `day_0.parquet`, … with the columns label (int8), I1_log1p … (float32), C1 … (int32).

    C1 … C26 are row numbers of the embedding tables. Files of the same names are replaced, each
    only once the new one is complete; memory holds one row group, whatever the number of rows.

    Args:
        shards: what to write.
        folder: made if it is not there.
        progress: called with the rows written so far, after every row group.

    Returns:
        The files, in the order of the days.

    Raises:
        ResourceError: pyarrow is not installed, or the folder cannot be written.
    """
    pyarrow = _pyarrow()
    paths = tuple(folder / f"day_{day}.parquet" for day in range(len(shards.days_RW)))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path, records_RW, before in zip(paths, shards.days_RW, shards.borders, strict=False):
            _write_day(pyarrow, path, records_RW, before, progress)
    except OSError as error:
        raise ResourceError(f"{folder}: cannot write Parquet: {error}") from error
    return paths


def _pyarrow() -> ModuleType:
    try:
        import_module("pyarrow.parquet")
        return import_module("pyarrow")
    except ImportError:
        raise ResourceError(
            "Parquet needs pyarrow, which is not installed: pip install 'dlrm-hybrid[parquet]'"
        ) from None


def _write_day(
    pyarrow: ModuleType, path: Path, records_RW: Words, before: int, progress: Callable[[int], None]
) -> None:
    partial = path.with_suffix(".parquet.partial")
    schema = _table(pyarrow, records_RW[:0]).schema
    try:
        with pyarrow.parquet.ParquetWriter(partial, schema, compression="zstd") as file:
            for start in range(0, len(records_RW), ROW_GROUP_ROWS):
                group_RW = records_RW[start : start + ROW_GROUP_ROWS]
                file.write_table(_table(pyarrow, group_RW), row_group_size=ROW_GROUP_ROWS)
                progress(before + start + len(group_RW))
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _table(pyarrow: ModuleType, records_RW: Words) -> Any:
    floats_RW, integers_RW = records_RW.view(np.float32), records_RW.view(np.int32)
    stored = [
        floats_RW[:, 0].astype(np.int8),
        *(floats_RW[:, word].copy() for word in range(FIRST_DENSE_WORD, FIRST_ID_WORD)),
        *(integers_RW[:, FIRST_ID_WORD + f].copy() for f in range(NUM_CATEGORICAL)),
    ]
    columns: list[Any] = [pyarrow.array(array) for array in stored]
    return pyarrow.table(columns, names=COLUMNS)
