"""What a disk refuses, as an error that names file and key; lines that are whole or not there."""

from __future__ import annotations

import errno
import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from dlrm_hybrid.types import ResourceError

RUN_FOLDER_KEY = "hydra.run.dir"
_REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


@contextmanager
def writing(path: Path, key: str) -> Generator[None, None, None]:
    """Where what happens inside writes `path`, raise ResourceError if the disk refuses it.

    Args:
        path: the file or folder.
        key: of the configuration that says where it lies.
    """
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror} ({key})") from error


@contextmanager
def refusals() -> Generator[None, None, None]:
    """Raise ResourceError where a disk refuses a file that nobody has looked after more closely.

    Anything else that the system refuses is an error of this program and passes.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or error.errno not in _REFUSALS:
            raise
        raise ResourceError(f"{os.fsdecode(error.filename)}: {error.strerror}") from error


def append(descriptor: int, data: bytes) -> None:
    """Write all of `data` at the end of a file, or nothing.

    Raises:
        OSError: the disk refuses; the file is as it was.
    """
    size = os.fstat(descriptor).st_size
    left = memoryview(data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        os.ftruncate(descriptor, size)
        raise
