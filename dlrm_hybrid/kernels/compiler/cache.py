"""Where compiled kernels are kept between processes: a file for each kernel and its types.

The folder is `$XDG_CACHE_HOME/dlrm_hybrid/kernels-…`, by default below `~/.cache`, and in the
temporary folder where that cannot be used; `NUMBA_CACHE_DIR` names another one. Its name has a hash
over the sources of all kernels and the versions of what compiles them.

numba keeps compiled code as pickles, which can do anything when they are read. So a folder or file
is used only if it belongs to this user and nobody else may write it, and a file is read only if the
checksum at its head is that of the rest. Any other file is removed and its kernel compiled again.
"""

from __future__ import annotations

import hashlib
import os
import pickle  # noqa: TID251 - numba's own format; checked before it is read
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, final

import llvmlite
import numba
from llvmlite import binding as llvm
from numba.core import config as numba_config
from numba.core.codegen import get_host_cpu_features
from numba.core.compiler import CompileResult
from numba.core.serialize import dumps

ROOT_VARIABLE = "NUMBA_CACHE_DIR"
SUFFIX = ".kernel"
_VARIABLES = (ROOT_VARIABLE, "XDG_CACHE_HOME", "HOME", "TMPDIR")
_NEEDED_BYTES = 4 * 2**20  # what all kernels take, and a little more
_FOLDER_MODE = 0o700
_WRITABLE_BY_OTHERS = 0o022
_DIGEST_BYTES = 32


class UnfitError(Exception):
    """A file that must not be used; the message says why."""


@dataclass(frozen=True, slots=True)
class KernelFolder:
    """Where this process keeps compiled kernels.

    Attributes:
        path: the folder; None if there is nowhere to keep them.
        refused: why folders that come before it are not used, a line each.
    """

    path: Path | None
    refused: tuple[str, ...]


def kernel_folder() -> KernelFolder:
    """The first folder that can be used, made if need be."""
    return _first_usable(tuple(os.environ.get(name) for name in _VARIABLES))


def sources_digest() -> str:
    """A hash over what the machine code of kernels depends on, but for the processor."""
    digest = hashlib.blake2b(digest_size=8)
    for version in (numba.__version__, llvmlite.__version__, sys.version):
        digest.update(version.encode())
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def processor() -> str:
    """For which processor kernels are compiled, and its features."""
    features: str = numba_config.CPU_FEATURES
    if numba_config.CPU_FEATURES is None:
        features = get_host_cpu_features()
    return f"{numba_config.CPU_NAME or llvm.get_host_cpu_name()} {features}"


def kernel_path(folder: Path, name: str, types: tuple[Any, ...]) -> Path:
    """The file of a kernel, compiled for these types of arguments and this processor."""
    digest = hashlib.blake2b(f"{types} {processor()}".encode(), digest_size=8)
    return folder / f"{name}-{digest.hexdigest()}{SUFFIX}"


def read_kernel(path: Path) -> bytes | None:
    """What is in the file of a kernel; None if there is no such file.

    Raises:
        UnfitError: it must not be used.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UnfitError(f"cannot be read ({error.strerror})") from error
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnfitError("is not a file")
        if (reason := _foreign(status)) is not None:
            raise UnfitError(reason)
        text = file.read()
    if text[:_DIGEST_BYTES] != _checksum(text[_DIGEST_BYTES:]):
        raise UnfitError("is damaged")
    return text[_DIGEST_BYTES:]


def drop(path: Path) -> None:
    """Remove a file that must not be used."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


@final
class KernelCache:
    """Compiled code of one kernel on disk: what a dispatcher of numba asks before it compiles.

    Args:
        name: of the kernel, `file.function`.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    @property
    def cache_path(self) -> str:
        """The folder, for numba's statistics."""
        return str(kernel_folder().path)

    def load_overload(self, types: tuple[Any, ...], target: Any) -> Any:
        """What is kept for these types; None if there is nothing that can be used."""
        folder = kernel_folder().path
        if folder is None:
            return None
        path = kernel_path(folder, self._name, types)
        try:
            payload = read_kernel(path)
            if payload is None:
                return None
            target.refresh()
            return CompileResult._rebuild(target, *pickle.loads(payload))
        except Exception as error:  # whatever is wrong with it, the source is still there
            reason = str(error) if isinstance(error, UnfitError) else f"is of no use ({error!r})"
            _say(f"{path}: {reason}; removed, the kernel is compiled again")
            drop(path)
            return None

    def save_overload(self, types: tuple[Any, ...], compiled: Any) -> None:
        """Keep what has been compiled; says so if that is not possible."""
        folder = kernel_folder().path
        if folder is None or compiled.library.has_dynamic_globals:
            return
        try:
            payload: bytes = dumps(compiled._reduce())
        except Exception as error:  # private parts of numba, which another version may change
            _tell_refused(folder, f"numba {numba.__version__}: {error!r}")
            return
        path = kernel_path(folder, self._name, types)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            # Whatever the umask: a file that others may write would not be believed later.
            with open(temporary, "xb", opener=_private) as file:  # noqa: PTH123
                file.write(_checksum(payload) + payload)
            temporary.replace(path)
        except OSError as error:
            drop(temporary)
            _tell_refused(folder, str(error.strerror))

    def enable(self) -> None:
        """Is part of what numba expects; there is nothing to switch."""

    def disable(self) -> None:
        """Is part of what numba expects; there is nothing to switch."""

    def flush(self) -> None:
        """Is part of what numba expects; files are removed where they are damaged."""


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _roots() -> Iterator[Path]:
    """Where the folder could be, the best place first."""
    if os.environ.get(ROOT_VARIABLE):
        yield Path(os.environ[ROOT_VARIABLE]).absolute()
    else:
        cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not cache_home.is_absolute():  # then it counts for nothing, says the XDG specification
            cache_home = _home() / ".cache"
        yield cache_home / "dlrm_hybrid"
    yield Path(tempfile.gettempdir()) / f"dlrm_hybrid-{os.geteuid()}"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError:  # neither HOME nor an entry for this user
        return Path("~")


@cache
def _first_usable(_variables: tuple[str | None, ...]) -> KernelFolder:
    refused: list[str] = []
    for root in _roots():
        path = root / f"kernels-{sources_digest()}"
        reason = _refusal(path)
        if reason is None:
            with suppress(OSError):
                os.utime(path)  # in use: `jit.tidy` removes folders that are not
            return KernelFolder(path, tuple(refused))
        refused.append(f"{path}: {reason}")
    return KernelFolder(None, tuple(refused))


def _refusal(path: Path) -> str | None:
    """Why compiled kernels cannot be kept in a folder, which is made if it is missing."""
    if not path.is_absolute():
        return "there is no home folder (HOME)"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(_FOLDER_MODE, exist_ok=True)
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            return "is not a folder"
        if (reason := _foreign(status)) is not None:
            return reason
        if not any(path.glob(f"*{SUFFIX}")):
            _try_writing(path)
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    return None if os.access(path, os.W_OK | os.X_OK) else "is not writable"


def _try_writing(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, _NEEDED_BYTES)


def _foreign(status: os.stat_result) -> str | None:
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None


def _checksum(payload: bytes) -> bytes:
    return hashlib.blake2b(payload, digest_size=_DIGEST_BYTES).digest()


def _say(text: str) -> None:
    """A line for a person; in a rank it goes to its log."""
    sys.stderr.write(f"{text}\n")


@cache  # said once, not for every kernel
def _tell_refused(folder: Path, reason: str) -> None:
    _say(f"{folder}: compiled kernels cannot be kept ({reason}): every process compiles its own")
