"""The one decorator of all kernels; numba keeps what it compiles in a folder of this program.

The folder is `$XDG_CACHE_HOME/dlrm_hybrid/kernels-…`, by default below `~/.cache`, or in the
temporary folder where that cannot be used; `NUMBA_CACHE_DIR` names another place. numba's own cache
notices a kernel that has changed but not a function that it calls, so the name of the folder has a
hash over the sources of all kernels, the versions of what compiles them, and the processor.

numba reads pickles, which can do anything: a folder is used only if it belongs to this user and
nobody else may write it. A damaged file is noticed by its checksum, and its kernel compiled again.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pickle  # noqa: TID251 - numba's own format, from a folder that only this user can write
import re
import shutil
import stat
import sys
import tempfile
import typing
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, final

import llvmlite
import numba
import numpy as np
from llvmlite import binding as llvm
from numba import types
from numba.core import caching
from numba.core import config as numba_config
from numba.core.codegen import get_host_cpu_features
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target
from numba.core.serialize import dumps

from dlrm_hybrid.arrays import Bytes
from dlrm_hybrid.kernels import ALL

Function = TypeVar("Function", bound=Callable[..., Any])

READ_ONLY = "read-only"
ReadOnlyBytes = Annotated[Bytes, READ_ONLY]
ROOT_VARIABLE = "NUMBA_CACHE_DIR"
_SHAPE = re.compile(r"_([A-Z][A-Z0-9]*)$")
_SCALARS: dict[Any, Any] = {int: types.int64, float: types.float64, bool: types.boolean}
_PACKAGE = "dlrm_hybrid.kernels"
_WRITABLE_BY_OTHERS = 0o022
_UNUSED_SECONDS = 30 * 86_400.0


def kernel(function: Function) -> Function:
    """Compile `function` without the interpreter lock; keeps its declared type for callers.

    One whose name begins with an underscore cannot be called from Python: it is compiled and kept
    as a part of the kernels that call it.
    """
    return _compiled(function, fast=False)


def reducing_kernel(function: Function) -> Function:
    """A `kernel` whose sums may be added in any order, so that they become vector instructions.

    The order depends on the processor: another one may give other last bits.
    """
    return _compiled(function, fast={"reassoc"})


def _compiled(function: Function, fast: bool | set[str]) -> Function:
    is_part = function.__name__.startswith("_")
    # No C function is ever made of a kernel, and each one would be compiled as well.
    compiled: Any = numba.njit(
        nogil=True, fastmath=fast, no_cfunc_wrapper=True, no_cpython_wrapper=is_part
    )(function)
    if not is_part:
        compiled._cache = _Cache(function)
        compiled._compiler.compile = compiled._cache.ends_turn_of(compiled._compiler.compile)
    return cast(Function, compiled)


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
    return _first_usable(_root(), Path(tempfile.gettempdir()))


def _root() -> Path:
    if root := os.environ.get(ROOT_VARIABLE):
        return Path(root).absolute()
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not cache_home.is_absolute():  # then it counts for nothing, says the XDG specification
        cache_home = Path(os.path.expanduser("~/.cache"))  # noqa: PTH111 - no error without a home
    return cache_home / "dlrm_hybrid"


@cache
def _first_usable(root: Path, temporary: Path) -> KernelFolder:
    name, refused = f"kernels-{_digest()}", list[str]()
    for path in (root / name, temporary / f"dlrm_hybrid-{os.geteuid()}-{name}"):
        reason = _refusal(path)
        if reason is None:
            with suppress(OSError):
                os.utime(path)
                _remove_unused(path)
            return KernelFolder(path, tuple(refused))
        refused.append(f"{path}: {reason}")
    return KernelFolder(None, tuple(refused))


def _remove_unused(folder: Path) -> None:
    """Remove folders of other versions that no process has begun to use for a month."""
    now_seconds = folder.stat().st_mtime
    for path in folder.parent.glob("kernels-" + "[0-9a-f]" * 16):
        if now_seconds - path.lstat().st_mtime > _UNUSED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def _refusal(path: Path) -> str | None:
    """Why compiled kernels cannot be kept in a folder, which is made if it is missing."""
    if not path.is_absolute():
        return "there is no home folder (HOME)"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        return f"cannot be used ({error.strerror})"
    if not stat.S_ISDIR(status.st_mode):
        return "is not a folder"
    if status.st_uid != os.geteuid():
        return f"belongs to another user (uid {status.st_uid})"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return None if os.access(path, os.W_OK | os.X_OK) else "is not writable"


@cache
def _digest() -> str:
    """A hash over what the machine code of kernels depends on."""
    digest = hashlib.blake2b(digest_size=8)
    for text in (numba.__version__, llvmlite.__version__, sys.version, processor()):
        digest.update(text.encode())
    for source in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()


@cache
def processor() -> str:
    """The processor that kernels are compiled for, and its features."""
    features: str = numba_config.CPU_FEATURES
    if numba_config.CPU_FEATURES is None:
        features = get_host_cpu_features()
    return f"{numba_config.CPU_NAME or llvm.get_host_cpu_name()} {features}"


@final
class _Locator(caching._CacheLocator):
    """Tells numba where the files of a kernel are."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        self._py_file = file
        self._module = function.__module__.removeprefix(f"{_PACKAGE}.")

    @classmethod
    def from_function(cls, py_func: Callable[..., Any], py_file: str) -> _Locator:
        return cls(py_func, py_file)

    def get_cache_path(self) -> str:
        return str(kernel_folder().path)

    def get_source_stamp(self) -> str:
        return _digest()

    def get_disambiguator(self) -> str:
        return self._module


class _Checked(caching.CompileResultCacheImpl):
    """What numba writes for a kernel, with a checksum."""

    _locator_classes = (_Locator,)

    def reduce(self, data: Any) -> tuple[str, bytes]:
        payload: bytes = dumps(super().reduce(data))
        return self._checksum(payload), payload

    def rebuild(self, target_context: Any, reduced_data: tuple[str, bytes]) -> Any:
        checksum, payload = reduced_data
        if checksum != self._checksum(payload):
            raise ValueError("its checksum differs")
        return super().rebuild(target_context, pickle.loads(payload))

    def _checksum(self, payload: bytes) -> str:
        return hashlib.blake2b(self.filename_base.encode() + payload).hexdigest()


class _Files(caching.FunctionCache):
    _impl_class = _Checked


@final
class _Cache(caching.NullCache):
    """numba's cache of one kernel, opened by the kernel's first call.

    Processes that need a kernel take turns: one compiles it, the others load what it has kept.
    Whatever is wrong with files is said, and the kernel is compiled.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._turn = ExitStack()

    @property
    def cache_path(self) -> str:
        return str(kernel_folder().path)

    @cached_property
    def _files(self) -> Any:
        folder = kernel_folder()
        if folder.refused:
            place = "no folder: each process compiles them" if folder.path is None else folder.path
            _say_once("\n".join((*folder.refused, f"compiled kernels are kept in {place}")))
        return None if folder.path is None else _Files(self._function)

    @property
    def _lock(self) -> Path:
        name = f"{self._function.__module__}.{self._function.__name__}.lock"
        return Path(self.cache_path, name)

    def is_taken(self) -> bool:
        """Whether a process compiles this kernel now."""
        try:
            with self._lock.open() as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:  # there is no such file yet, or no locks
            return False
        return False

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """The kernel for these types; None if this process is to compile it."""
        self._turn.close()
        if self._files is None:
            return None
        loaded = self._load(sig, target_context)
        if loaded is None:
            with suppress(OSError):  # a file system without locks, or a full one
                file = self._turn.enter_context(self._lock.open("w"))
                fcntl.flock(file, fcntl.LOCK_EX)
            loaded = self._load(sig, target_context)
        if loaded is not None:
            self._turn.close()
        return loaded

    def _load(self, sig: Any, target_context: Any) -> Any:
        try:
            return self._files.load_overload(sig, target_context)
        except Exception as error:  # whatever is wrong with a file, the source is still there
            name = self._function.__name__
            _say(f"{self.cache_path}: {name} is damaged ({error!r}) and compiled again")
            with suppress(OSError):
                self._files.flush()
            return None

    def ends_turn_of(self, compile: Function) -> Function:
        """The same function; if it fails, others need not wait for what it was to compile."""

        def compiled(*arguments: Any) -> Any:
            try:
                return compile(*arguments)
            except BaseException:
                self._turn.close()
                raise

        return cast(Function, compiled)

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep a compiled kernel, and let others load it."""
        with self._turn:
            if self._files is not None:
                try:
                    self._files.save_overload(sig, data)
                except Exception as error:  # the kernel is there, for this process
                    _say_once(f"{self.cache_path}: compiled kernels cannot be kept ({error!r})")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


_say_once = cache(_say)


def argument_types(function: Callable[..., Any]) -> tuple[Any, ...]:
    """The numba types for which a kernel is compiled ahead, by its annotations."""
    hints = typing.get_type_hints(function, include_extras=True)
    hints.pop("return", None)
    return tuple(_type(name, hint) for name, hint in hints.items())


def _type(name: str, hint: Any) -> Any:
    if hint in _SCALARS:
        return _SCALARS[hint]
    if isinstance(hint, type) and issubclass(hint, np.generic):
        return numba.from_dtype(np.dtype(hint))
    fields = getattr(hint, "__annotations__", None) if isinstance(hint, type) else None
    if fields is not None:  # a NamedTuple of arrays
        of_fields = typing.get_type_hints(hint, include_extras=True)
        return types.NamedTuple([_type(name, of_fields[name]) for name in fields], hint)
    is_read_only = READ_ONLY in getattr(hint, "__metadata__", ())
    array = hint.__origin__ if is_read_only else hint
    scalar = typing.get_args(typing.get_args(array)[1])[0]  # of NDArray[scalar]
    shape = _SHAPE.search(name)
    dimensions = len(shape[1]) if shape else 1
    return types.Array(numba.from_dtype(np.dtype(scalar)), dimensions, "C", readonly=is_read_only)


def import_numba() -> None:
    """Load the 200 modules that numba imports before it loads its first kernel from the cache."""
    cpu_target.target_context.refresh()


def kernels() -> Iterator[tuple[str, Any]]:
    """All kernels that can be called, as "file.kernel", the files in the order of `ALL`."""
    for file in ALL:
        module = import_module(f"{_PACKAGE}.{file}")
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher) and not name.startswith("_"):
                function: Any = value
                if function.py_func.__module__ == module.__name__:
                    yield f"{file}.{name}", function


def kept_kernels(folder: Path) -> int:
    """How many kernels are kept in a folder."""
    return len([*folder.glob("*.nbi")])


def are_kept(names: Collection[str]) -> bool:
    """Whether kernels, by their names in `kernels`, are kept; also if they cannot be."""
    folder = kernel_folder().path
    parts = [name.rpartition(".") for name in names]
    return folder is None or all(any(folder.glob(f"*.{k}-{file}.*.nbi")) for file, _, k in parts)


def compile_missing(names: Collection[str] = ()) -> None:
    """Compile kernels that the cache lacks, and keep them.

    Those that another process compiles are left to it, so several that do this share the work.

    Args:
        names: of `kernels`, in the order of compiling; by default all.
    """
    functions = dict(kernels())
    for function in map(functions.__getitem__, names or functions):
        if not function._cache.is_taken():
            function.compile(argument_types(function.py_func))
