"""A folder of prepared rows, opened for reading: checked, mapped, addressed by row.

Rows of all days count through, day after day. Shapes: R rows, W = 40 words of a record.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_hybrid.data import manifest as manifests
from dlrm_hybrid.data.format import NUM_CATEGORICAL, RECORD_BYTES, RECORD_WORDS
from dlrm_hybrid.data.manifest import Manifest, Semantics, Shard
from dlrm_hybrid.types import DataError

Words = npt.NDArray[np.uint32]

HASHED_AT_ONCE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Shards:
    """Prepared rows on disk.

    Attributes:
        manifest: what the rows are.
        days_RW: uint32, read-only maps of the records, one per day.
        borders: first row of each day, then the number of all rows.
    """

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

    def copy_into(self, rows: range, out_RW: Words) -> None:
        """Read consecutive rows into the first `len(rows)` records of `out_RW`."""
        at = 0
        for piece_RW in self.pieces(rows):
            out_RW[at : at + len(piece_RW)] = piece_RW
            at += len(piece_RW)


def open_shards(folder: Path, expected: Semantics | None, verify: bool = False) -> Shards:
    """Open prepared rows; sizes are always checked, checksums if `verify`.

    Args:
        folder: what `prepare` wrote.
        expected: the options the rows must have been made with; None takes them as they are.
        verify: read every byte and compare the checksums.

    Raises:
        DataError: no manifest, other options than expected, or a file is missing, cut or altered.
    """
    manifest = manifests.read(folder)
    _check_options(folder, manifest, expected)
    _check_shape(folder, manifest)
    for shard in manifest.days:
        _check_size(folder / shard.file, shard)
    days_RW = tuple(_map(folder / shard.file, shard.rows) for shard in manifest.days)
    if verify:
        for shard, records_RW in zip(manifest.days, days_RW, strict=True):
            _check_sum(folder / shard.file, shard, records_RW)
    borders = [0]
    for shard in manifest.days:
        borders.append(borders[-1] + shard.rows)
    return Shards(manifest, days_RW, tuple(borders))


def _check_options(folder: Path, manifest: Manifest, expected: Semantics | None) -> None:
    if expected is None or manifest.semantics == expected:
        return
    found, wanted = asdict(manifest.semantics), asdict(expected)
    different = "; ".join(
        f"data.{key}: prepared with {found[key]!r}, the configuration says {wanted[key]!r}"
        for key in wanted
        if found[key] != wanted[key]
    )
    raise DataError(
        f"{folder}: made with other options ({different});"
        " run `prepare` again or name another folder in data.prepared"
    )


def _check_shape(folder: Path, manifest: Manifest) -> None:
    path = folder / manifests.MANIFEST_FILE
    if len(manifest.days) != manifest.semantics.days or len(manifest.days) < 2:
        raise DataError(
            f"{path}: lists {len(manifest.days)} shards, its option days is"
            f" {manifest.semantics.days} and must be at least 2"
        )
    if len(manifest.table_rows) != NUM_CATEGORICAL:
        raise DataError(
            f"{path}: has {len(manifest.table_rows)} table sizes, expected {NUM_CATEGORICAL}"
        )


def _check_size(path: Path, shard: Shard) -> None:
    try:
        num_bytes = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    if num_bytes != shard.rows * RECORD_BYTES:
        raise DataError(
            f"{path}: has {num_bytes} bytes, expected {shard.rows * RECORD_BYTES}"
            f" for {shard.rows} rows; run `prepare` again"
        )


def _map(path: Path, rows: int) -> Words:
    if rows == 0:  # an empty file cannot be mapped
        return np.empty((0, RECORD_WORDS), np.uint32)
    return np.asarray(np.memmap(path, np.uint32, mode="r", shape=(rows, RECORD_WORDS)))


def _check_sum(path: Path, shard: Shard, records_RW: Words) -> None:
    digest = xxhash.xxh3_128()
    step = HASHED_AT_ONCE_BYTES // RECORD_BYTES
    for row in range(0, len(records_RW), step):
        digest.update(records_RW[row : row + step].data)
    if digest.hexdigest() != shard.xxh3:
        raise DataError(
            f"{path}: checksum xxh3-128 is {digest.hexdigest()}, expected {shard.xxh3};"
            " the file was altered: run `prepare` again"
        )
