"""What a disk refuses, as an error that names file and key; appended lines; locks."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Generator
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


class HeldError(Exception):
    """Another process holds a lock; the message says which one: `process 4711 on node-3`."""


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None) -> Generator[None, None, None]:
    """Hold the exclusive lock file `path` inside a `with`.

    The kernel takes the lock back when the process ends, even after kill -9.

    Args:
        path: made if need be in a folder that is there, and removed at the end.
        waiting: called once with who holds the lock, before waiting for it; without it a lock that
            is held is an error.

    Raises:
        HeldError: another process holds it, and `waiting` is None.
        OSError: the file cannot be made.
    """
    descriptor = _lock(path, waiting)
    try:
        yield
    finally:
        try:
            path.unlink(missing_ok=True)  # still locked: who waits notices, and makes a new one
        finally:
            os.close(descriptor)


def _lock(path: Path, waiting: Callable[[str], None] | None) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(descriptor, 1024, 0).decode("utf-8", "replace").strip()
                holder = holder if holder.isprintable() and holder else "another process"
                if waiting is None:
                    raise HeldError(holder) from None
                waiting(holder)
                waiting = _say_nothing
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.pwrite(
                    descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0
                )
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder has just finished and removed it


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _say_nothing(holder: str) -> None:
    """It has been said before."""
