"""`manifest.json`: what a folder of shards says about itself and the raw files it was made from.

Shapes: R rows, W = 40 words of a record.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, cast

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import Field, TypeAdapter, ValidationError

from dlrm_hybrid import disk
from dlrm_hybrid.data.format import BLOCK_ROWS, NUM_CATEGORICAL, RECORD_BYTES
from dlrm_hybrid.types import DataError

MANIFEST_FILE = "manifest.json"
# What a killed writer of a manifest has left; the second name is that of older versions.
UNFINISHED_FILES = (f".{MANIFEST_FILE}.partial", "manifest.new")
FORMAT: Final = 2
MOST_BYTES = 1 << 28  # of the file: a terabyte of rows has 100 MB of block checksums
Words = npt.NDArray[np.uint32]
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Xxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_BlockXxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Semantics:
    """The options that decide what the rows mean; shards made under others are refused.

    Attributes:
        days: number of consecutive parts; the last one is the test part.
        day_split: `equal_rows` cuts all rows into `days` equal parts in file order, the first ones
            one row longer, as facebookresearch/dlrm; `files` takes one raw file as one day.
        vocabulary: `all_days` gives every category of every day an id, as facebookresearch/dlrm;
            `train_days` knows only those of the training days, all others share id 0.
        min_count: categories seen fewer times than this within the vocabulary's days share id 0;
            0 and 1 drop none.
        max_ind_range: categories are taken modulo this before the vocabulary; 0 disables it.
        on_bad_row: `error`, `skip` or `quarantine`.
    """

    days: int
    day_split: str
    vocabulary: str
    min_count: int
    max_ind_range: int
    on_bad_row: str

    def differences(self, wanted: Semantics) -> list[str]:
        """Each option that is not as wanted, with its key and both values."""
        now = asdict(wanted)
        return [
            f"data.{name}: prepared with {value!r}, the configuration says {now[name]!r}"
            for name, value in asdict(self).items()
            if value != now[name]
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileStamp:
    """What is seen of a raw file without reading all of it.

    Attributes:
        name: without its folder.
        num_bytes: its size.
        mtime_ns: time of the last change of its bytes, which programs may set.
        ctime_ns: time of the last change of bytes, name or rights, which only the system sets.
        inode: its number in the file system.
        sample_xxh3: xxh3-128 of its first and last MiB and of pieces between.
    """

    name: str
    num_bytes: _Count
    mtime_ns: int
    ctime_ns: int
    inode: int
    sample_xxh3: _Xxh3


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A raw file as it was read.

    Attributes:
        stamp: of the file.
        xxh3: xxh3-128 of all its bytes.
        copies: stamps of files that were found to have the same bytes, the newest first.
    """

    stamp: FileStamp
    xxh3: _Xxh3
    copies: tuple[FileStamp, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """The file with the records of one day.

    Attributes:
        file: name in the folder: `day_0.bin` …
        rows: records of `format.RECORD_BYTES`.
        clicks: rows with label 1.
        xxh3: xxh3-128 over all bytes of the file.
        blocks: xxh3-64 of each block of `format.BLOCK_ROWS` rows, the last one shorter.
    """

    file: str
    rows: _Count
    clicks: _Count
    xxh3: _Xxh3
    blocks: tuple[_BlockXxh3, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """Everything a reader needs to trust the shards.

    Attributes:
        days: one shard per day in order; the last is the test part.
        table_rows: ids in use per categorical column, the shared id 0 included.
        out_of_vocabulary: whether id 0 of every column represents unknown categories.
        vocabulary_xxh3: xxh3-128 over the xxh3-128 digests of the 26 vocabulary files.
        bad_rows: raw rows that were left out.
        zero_keys: fields that literally held 00000000 and share the id of a missing value.
    """

    format: Literal[2]
    semantics: Semantics
    sources: tuple[SourceFile, ...]
    days: tuple[Shard, ...]
    table_rows: Annotated[
        tuple[Annotated[int, Field(ge=1, le=2**31)], ...],
        Field(min_length=NUM_CATEGORICAL, max_length=NUM_CATEGORICAL),
    ]
    out_of_vocabulary: bool
    vocabulary_xxh3: _Xxh3
    bad_rows: _Count
    zero_keys: _Count

    @property
    def identity(self) -> list[str]:
        """Checksums of the shards: the same rows in the same order, whatever their folder."""
        return [day.xxh3 for day in self.days]

    @property
    def vocabulary(self) -> dict[str, Any]:
        """What decides which category an id means."""
        return {
            "vocabulary_xxh3": self.vocabulary_xxh3,
            "table_rows": list(self.table_rows),
            "out_of_vocabulary": self.out_of_vocabulary,
            "max_ind_range": self.semantics.max_ind_range,
        }

    @property
    def rows(self) -> int:
        """How many records all days hold together."""
        return sum(day.rows for day in self.days)


def write(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into `folder`, complete and on the disk or not at all."""
    disk.replace_text(folder / MANIFEST_FILE, json.dumps(asdict(manifest), indent=1))


def read(folder: Path) -> Manifest:
    """Read the manifest of a prepared folder.

    Raises:
        DataError: there is none, or it is not one that `write` has written; the message names the
            file and the field.
    """
    path = folder / MANIFEST_FILE
    try:
        if path.stat().st_size > MOST_BYTES:
            raise DataError(
                f"{path}: not a manifest of prepared rows: more than {MOST_BYTES} bytes"
            )
        content = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{folder}: no prepared rows here (no {MANIFEST_FILE})") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        found = TypeAdapter(Manifest).validate_json(content, strict=True)
    except ValidationError as error:
        if _format_of(content) == 1:
            raise DataError(
                f"{path}: prepared by an older version of this program, without checksums of "
                f"blocks (format 1, now {FORMAT}); prepare the rows again"
            ) from error
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{path}: not a manifest of prepared rows: {field or 'file'}: {first['msg']}"
        ) from error
    if fault := _contradiction(found):
        raise DataError(f"{path}: {fault}")
    return found


def size_fault(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the size of a shard's file; None if all are as large as they must be."""
    for day in manifest.days:
        path, wanted_bytes = folder / day.file, day.rows * RECORD_BYTES
        try:
            num_bytes = path.stat().st_size
        except OSError as error:
            return f"{path}: cannot be read: {error.strerror}"
        if num_bytes != wanted_bytes:
            return f"{path}: has {num_bytes} bytes, expected {wanted_bytes} for {day.rows} rows"
    return None


def _format_of(content: bytes) -> object:
    try:
        values: Any = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return cast(dict[str, Any], values).get("format") if isinstance(values, dict) else None


def _contradiction(manifest: Manifest) -> str | None:
    """What of a manifest does not fit the rest of it."""
    if len(manifest.days) != manifest.semantics.days:
        return (
            f"days: lists {len(manifest.days)} shards, semantics.days is {manifest.semantics.days}"
        )
    for number, day in enumerate(manifest.days):
        if day.file != f"day_{number}.bin":
            return f"days.{number}.file: {day.file!r} instead of 'day_{number}.bin'"
        if day.clicks > day.rows:
            return f"days.{number}.clicks: {day.clicks} of {day.rows} rows"
        if len(day.blocks) != -(-day.rows // BLOCK_ROWS):
            return f"days.{number}.blocks: {len(day.blocks)} checksums for {day.rows} rows"
    return None


_EDGE_BYTES = 1 << 20
_PIECES = 16
_PIECE_BYTES = 1 << 16


def stamp(path: Path) -> FileStamp:
    """Size, times and a sampled checksum, which identify a raw file without reading all of it.

    Raises:
        DataError: it is missing, not a regular file or cannot be read.
    """
    if not path.is_file():
        what = "not a regular file" if path.exists() else "no such file"
        raise DataError(f"{path}: {what} (data.raw)")
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            digest = xxhash.xxh3_128(file.read(_EDGE_BYTES))
            for piece in range(1, _PIECES + 1):
                file.seek(status.st_size * piece // (_PIECES + 1))
                digest.update(file.read(_PIECE_BYTES))
            file.seek(max(0, status.st_size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} (data.raw)") from error
    return FileStamp(
        name=path.name,
        num_bytes=status.st_size,
        mtime_ns=status.st_mtime_ns,
        ctime_ns=status.st_ctime_ns,
        inode=status.st_ino,
        sample_xxh3=digest.hexdigest(),
    )


def file_xxh3(path: Path) -> str:
    """The xxh3-128 of all bytes of a raw file.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return disk.content(path).xxh3
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} (data.raw)") from error
