"""What tells a raw file from another one, or from itself after a change."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from dlrm_hybrid.data.manifest import FileStamp
from dlrm_hybrid.durable import content
from dlrm_hybrid.types import DataError

_EDGE_BYTES = 1 << 20
_PIECES = 16
_PIECE_BYTES = 1 << 16


def stamp(path: Path) -> FileStamp:
    """What tells a raw file from another one without reading all of it.

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
        return content(path).xxh3
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} (data.raw)") from error
