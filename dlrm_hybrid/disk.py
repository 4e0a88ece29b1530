"""Durable files, lock files, and checks of files from others; errors name the file."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import stat
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import xxhash
from pydantic_core import from_json

from dlrm_hybrid import limits
from dlrm_hybrid.types import DataError, DlrmError, ResourceError

CHUNK_BYTES = 1 << 24
RUN_FOLDER_KEY = "hydra.run.dir"
SWEEP_FOLDER_KEY = "hydra.sweep.dir"
NAMED_SECONDS = 2.0  # for the new holder of a lock to write its name
POLL_SECONDS = 0.01
MOST_JSON_BYTES = 1 << 25
_REFUSALS = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO),
    *(errno.ENOENT, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP),
)


@dataclass(frozen=True, slots=True)
class Content:
    """Size and checksum of a file's content.

    Attributes:
        xxh3: checksum (XXH3, 128 bits) in hexadecimal digits.
    """

    num_bytes: int
    xxh3: str


def write(path: Path, parts: Iterable[memoryview]) -> Content:
    """Write a new file and flush it to the disk; other threads run meanwhile.

    A file of this name is removed, not written into: it may be a link that leads elsewhere. The
    checksum is that of the bytes in memory; reading the file back shows what the disk has kept.

    Raises:
        OSError: it cannot be written.
    """
    digest = xxhash.xxh3_128()
    num_bytes = 0
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            for begin in range(0, len(part), CHUNK_BYTES):
                chunk = part[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                _write_all(descriptor, chunk)
            num_bytes += len(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Content(num_bytes, digest.hexdigest())


def content(path: Path, progress: Callable[[int], object] = lambda done: None) -> Content:
    """Read a file for its size and checksum.

    Args:
        progress: called with the number of bytes read so far.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            progress(num_bytes)
    return Content(num_bytes, digest.hexdigest())


@contextmanager
def replacing(path: Path) -> Generator[Path, None, None]:
    """Replace a file atomically: yield a path to write to, renamed to `path` at the end.

    Nothing is at the yielded path at first, not even a link. After an error it is removed.

    Raises:
        OSError: it cannot be written.
    """
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    try:
        yield partial
        flush(partial)
        partial.replace(path)
        flush(path.parent)
    finally:
        partial.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Replace a file by this text, atomically; raises OSError."""
    with replacing(path) as partial:
        write(partial, [memoryview(text.encode())])


def flush(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def link_files(source: Path, target: Path, names: Iterable[str]) -> None:
    """Make a folder of hard links to files and subfolders of another; copies across file systems.

    Args:
        target: the folder to make; one that is there is replaced.
        names: files of `source` to link, and subfolders whose files are linked.

    Raises:
        OSError: it cannot be made; the previous `target` is gone or as it was.
    """
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    for name in names:
        if (source / name).is_dir():
            (partial / name).mkdir()
            for path in (source / name).iterdir():
                _link(path, partial / name / path.name)
            flush(partial / name)
        else:
            _link(source / name, partial / name)
    flush(partial)
    if target.exists():
        shutil.rmtree(target)
    partial.rename(target)
    flush(target.parent)


def _link(source: Path, target: Path) -> None:
    try:
        os.link(os.path.realpath(source), target)
    except OSError:
        shutil.copyfile(source, target)
        flush(target)


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]


@contextmanager
def writing(path: Path, key: str) -> Generator[None, None, None]:
    """Turn an OSError inside the `with` into a ResourceError that names `path`.

    Args:
        path: the file or folder that is written.
        key: the configuration key that says where it lies.
    """
    try:
        yield
    except OSError as error:
        raise ResourceError(f"{path}: cannot be written: {error.strerror} ({key})") from error


@contextmanager
def refusals() -> Generator[None, None, None]:
    """Turn errors of the system that nothing else has handled into ResourceError.

    The system may refuse a file, or more files, memory or processes than a limit allows. Any other
    error is a bug of this program and passes.
    """
    try:
        yield
    except DlrmError:
        raise
    except Exception as error:
        limit = limits.reached(error)
        if limit is not None:
            raise ResourceError(limit) from error
        if not isinstance(error, OSError) or error.filename is None or error.errno not in _REFUSALS:
            raise
        raise ResourceError(f"{os.fsdecode(error.filename)}: {error.strerror}") from error


def append(descriptor: int, data: bytes) -> None:
    """Append all of `data` to a file, or raise OSError and leave it as it was."""
    size = os.fstat(descriptor).st_size
    try:
        _write_all(descriptor, memoryview(data))
    except OSError:
        os.ftruncate(descriptor, size)
        raise


class HeldError(Exception):
    """Another process holds a lock; the message says which one: `process 4711 on node-3`."""


@contextmanager
def locked(path: Path, waiting: Callable[[str], None] | None = None) -> Generator[None, None, None]:
    """Hold the exclusive lock file `path` inside a `with`.

    The kernel releases the lock when the process ends, even after kill -9; child processes do not
    inherit it. On a file system without locks a warning is printed and no process is kept out.

    Args:
        path: the lock file; made in an existing folder, and removed at the end.
        waiting: called once with the holder's name before waiting for a lock that is held; None
            makes that an error.

    Raises:
        HeldError: another process holds it, and `waiting` is None.
        OSError: the file cannot be made.
    """
    descriptor = _lock(path, waiting)
    try:
        yield
    finally:
        try:
            if _is_at(descriptor, path):
                path.unlink(missing_ok=True)  # while locked: a waiter notices, and makes a new one
        finally:
            os.close(descriptor)


def _lock(path: Path, waiting: Callable[[str], None] | None) -> int:
    has_waited = False
    while True:
        # O_NOFOLLOW: the folder may be of unknown origin.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o666)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = _holder(descriptor)
                if waiting is None:
                    raise HeldError(holder) from None
                if not has_waited:
                    waiting(holder)
                has_waited = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                    raise
                sys.stderr.write(f"{path}: cannot be locked here ({error.strerror})\n")
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


def _holder(descriptor: int) -> str:
    """The name that the holder of a lock has written into its file."""
    deadline = time.monotonic() + NAMED_SECONDS
    before = ""
    while time.monotonic() < deadline:
        name = os.pread(descriptor, 1024, 0).decode("utf-8", "replace").strip()
        # Read twice: the first name may be a dead process's, about to be overwritten.
        if name and name == before:
            return name if name.isprintable() else "another process"
        before = name
        time.sleep(POLL_SECONDS)
    return "another process"


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


def check_inside(folder: Path, apart: Collection[str] = ()) -> None:
    """Refuse to write into a folder with links that lead out of it, pipes or devices.

    Args:
        apart: names of subfolders to skip, as another program writes them.

    Raises:
        DataError: a link leads out of it, or an entry is neither a file nor a folder.
    """
    root, waiting = folder.resolve(), [folder]
    while waiting:
        here = waiting.pop()
        with suppress(FileNotFoundError), os.scandir(here) as entries:  # others may remove theirs
            for entry in entries:
                path = Path(entry.path)
                if entry.is_dir(follow_symlinks=False):
                    waiting += [] if here == folder and entry.name in apart else [path]
                elif entry.is_symlink() and not path.resolve().is_relative_to(root):
                    raise DataError(
                        f"{path}: is a link that leads out of {folder}, to {path.resolve()}; "
                        "nothing is written into such a folder"
                    )
                elif not (entry.is_symlink() or entry.is_file(follow_symlinks=False)):
                    raise DataError(f"{path}: is neither a file nor a folder")


def plain_file(folder: Path, file: str, instead: str = "") -> Path:
    """The path of a plain file in a folder; `instead` ends the message of an error.

    Raises:
        DataError: it is missing, is no plain file, or its name or a link leads out of the folder.
    """
    path = folder / file
    try:
        real = path.resolve(strict=True)
        inside = real.is_relative_to(folder.resolve())
        plain = stat.S_ISREG(real.stat().st_mode)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}{instead}") from error
    if not inside:
        raise DataError(f"{path}: leads out of its folder, to {real}{instead}")
    if not plain:
        raise DataError(f"{path}: is not a plain file{instead}")
    return path


def read_text(folder: Path, file: str, most_bytes: int, instead: str = "") -> str:
    """The text of a small file in a folder; raises DataError like `plain_file`, or if too large."""
    path = plain_file(folder, file, instead)
    try:
        with path.open("rb") as opened:
            data = opened.read(most_bytes + 1)
        if len(data) > most_bytes:
            raise DataError(f"{path}: has more than {most_bytes:,} bytes{instead}")
        return data.decode("utf-8")
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}{instead}") from error


def read_object(folder: Path, file: str) -> dict[str, Any]:
    """The object in a folder's JSON file; raises DataError like `read_text`, or if it is none."""
    text = read_text(folder, file, MOST_JSON_BYTES)
    try:
        value: Any = from_json(text)
    except ValueError as error:
        raise DataError(f"{folder / file}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{folder / file}: is not an object")
    return cast("dict[str, Any]", value)
