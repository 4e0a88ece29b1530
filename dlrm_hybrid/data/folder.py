"""The output folder of prepare: made aside under a lock, renamed when it is complete."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from dlrm_hybrid.data import manifest
from dlrm_hybrid.data.format import RECORD_BYTES
from dlrm_hybrid.data.manifest import Manifest, Semantics, SourceFile
from dlrm_hybrid.data.spill import Spill
from dlrm_hybrid.types import DataError, ResourceError

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Request:
    """What the output must have been made from to be current."""

    semantics: Semantics
    sources: Sequence[SourceFile]


@dataclass(frozen=True, slots=True)
class Partial:
    """`<output>.partial`, locked. Its two folders have new names each time, so that a late write
    of a dying worker of an earlier run cannot reach them.
    """

    folder: Path
    output: Path
    result: Path
    spill: Spill

    def publish(self) -> None:
        """Make the result the output, atomically.

        Raises:
            DataError: something else took its place in the meantime.
        """
        flush(self.result)
        try:
            self.result.rename(self.output)
        except OSError as error:
            raise DataError(f"{self.output}: cannot be put in place: {error}") from error
        flush(self.output.parent)


def current(output: Path, request: Request) -> Manifest | None:
    """The manifest of an output that is what `request` asks for; None if there is no output yet.

    Raises:
        DataError: the folder is foreign, incomplete or made from something else.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return None
    advice = "remove it or choose another data.prepared"
    try:
        found = manifest.read(output)
    except DataError as error:
        raise DataError(f"{output} was not made by prepare ({error}): {advice}") from error
    differences = list(_differences(found, request))
    if differences:
        raise DataError(
            f"{output} was made from something else: {'; '.join(differences)}: {advice}"
        )
    for day in found.days:
        path = output / day.file
        wanted_bytes = day.rows * RECORD_BYTES
        if not path.is_file() or path.stat().st_size != wanted_bytes:
            raise DataError(f"{path}: not {wanted_bytes} bytes: the folder is damaged: {advice}")
    return found


def _differences(found: Manifest, request: Request) -> Iterator[str]:
    wanted = asdict(request.semantics)
    for name, value in asdict(found.semantics).items():
        if value != wanted[name]:
            yield f"data.{name} is {wanted[name]!r}, there it was {value!r}"
    if tuple(found.sources) != tuple(request.sources):
        names = ", ".join(source.name for source in found.sources)
        same = names == ", ".join(source.name for source in request.sources)
        yield f"data.raw holds other {'bytes' if same else 'files'}, there it was {names}"


@contextmanager
def partial(output: Path) -> Generator[Partial, None, None]:
    """Take the lock beside `output`, clear what a killed run left; removed again at the end.

    Raises:
        ResourceError: another prepare holds the lock, or the folder cannot be made.
    """
    folder = output.parent / f"{output.name}.partial"
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        lock = _lock(folder)
    except OSError as error:
        raise ResourceError(f"{folder} cannot be made: {error} (data.prepared)") from error
    try:
        for leftover in folder.iterdir():
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        token = secrets.token_hex(4)
        result, spill = folder / f"result-{token}", folder / f"spill-{token}"
        result.mkdir()
        spill.mkdir()
        yield Partial(folder, output, result, Spill(spill))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _lock(folder: Path) -> int:
    """A descriptor of `folder` that holds its lock until closed or the process ends."""
    while True:
        folder.mkdir(exist_ok=True)
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # its owner has just finished
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(fd), folder.stat()):
                return fd
        except BlockingIOError:
            os.close(fd)
            raise ResourceError(
                f"another prepare is at work in {folder}: wait, or choose another data.prepared"
            ) from None
        except FileNotFoundError:
            pass
        os.close(fd)


def flush(folder: Path) -> None:
    """Flush the names in a folder to the disk."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to begin what cannot be finished.

    Raises:
        ResourceError: fewer bytes are free than needed.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise ResourceError(
            f"{folder}: prepare needs about {needed_bytes:,} bytes of disk, {free_bytes:,} are "
            "free (data.prepared)"
        )


@contextmanager
def disk_errors(output: Path) -> Generator[None, None, None]:
    """Turn what the disk refuses into a `ResourceError` that names the key."""
    try:
        yield
    except OSError as error:
        what = "no room left on the disk" if error.errno in _NO_ROOM else "the disk refuses"
        raise ResourceError(f"{output}: {what}: {error} (data.prepared)") from error
