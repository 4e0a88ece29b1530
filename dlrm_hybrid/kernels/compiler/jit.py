"""The one decorator of all kernels, the types that each is compiled for, and compiling ahead.

A kernel is compiled for one list of types, which its annotations say: `int` is int64, `float` is
float64, an array is contiguous and has as many dimensions as the suffix of its name has letters,
one if it has none. So all kernels can be compiled before a run needs them. A call with other types
compiles what it needs and is no error.

numba does not notice that a function in another file has changed; the name of the cache folder has
a hash over all files for that (`kernels.compiler.cache`).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import typing
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core.dispatcher import Dispatcher
from numba.core.registry import cpu_target

from dlrm_hybrid.kernels import ALL
from dlrm_hybrid.kernels.compiler.cache import (
    KernelCache,
    UnfitError,
    drop,
    kernel_path,
    read_kernel,
)

Function = TypeVar("Function", bound=Callable[..., Any])

READ_ONLY = "read-only"
ReadOnlyBytes = Annotated[npt.NDArray[np.uint8], READ_ONLY]
_SHAPE = re.compile(r"_([A-Z][A-Z0-9]*)$")
_SCALARS: dict[Any, Any] = {int: types.int64, float: types.float64, bool: types.boolean}
_PACKAGE = "dlrm_hybrid.kernels"
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
        file = function.__module__.removeprefix(f"{_PACKAGE}.")
        compiled._cache = KernelCache(f"{file}.{function.__name__}")
    return cast(Function, compiled)


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
    """Bring the 200 modules that numba imports before it loads its first kernel from the cache."""
    cpu_target.target_context.refresh()


@dataclass(frozen=True, slots=True)
class CacheState:
    """Which kernels of some files are compiled.

    Attributes:
        missing: those that are not, as "file.kernel".
        compiled: how many are.
        kernels: how many there are.
        num_bytes: size of those that are compiled.
        damaged: files of the cache that could not be used, with the reason; they are removed.
    """

    missing: tuple[str, ...]
    compiled: int
    kernels: int
    num_bytes: int
    damaged: tuple[str, ...]


def cache_state(folder: Path, files: Iterable[str]) -> CacheState:
    """What of some files of kernels is compiled; cached files that must not be used are removed."""
    missing: list[str] = []
    damaged: list[str] = []
    sizes: list[int] = []
    for name, function in _kernels(files):
        path = kernel_path(folder, name, argument_types(function.py_func))
        try:
            payload = read_kernel(path)
        except UnfitError as error:
            damaged.append(f"{path}: {error}")
            drop(path)
            payload = None
        if payload is None:
            missing.append(name)
        else:
            sizes.append(len(payload))
    return CacheState(
        tuple(missing), len(sizes), len(sizes) + len(missing), sum(sizes), tuple(damaged)
    )


def compile_kernel(name: str) -> None:
    """Compile one kernel, "file.kernel", if the cache lacks it, and keep it."""
    import_numba()
    function = dict(_kernels([name.rpartition(".")[0]]))[name]
    function.compile(argument_types(function.py_func))


def serve() -> None:
    """Body of a process: compile each kernel that a line of stdin names, and repeat the line."""
    for line in sys.stdin:
        compile_kernel(line.strip())
        sys.stdout.write(line)
        sys.stdout.flush()


def unforeseen(files: Collection[str]) -> list[str]:
    """Kernels that this process has called, though they are not compiled ahead for its run.

    Args:
        files: of kernels that are compiled ahead.
    """
    return [
        name
        for name, function in _kernels(file for file in ALL if f"{_PACKAGE}.{file}" in sys.modules)
        if function.signatures  # most are not called: their types need not be found
        and (
            name.rpartition(".")[0] not in files
            or set(function.signatures) != {argument_types(function.py_func)}
        )
    ]


def tidy(folder: Path) -> None:
    """Remove what killed processes have left half written, and folders of versions long unused.

    Call it only where no other process compiles into the folder.
    """
    os.utime(folder)  # in use
    now_seconds = folder.stat().st_mtime
    for path in folder.glob("*.tmp"):
        drop(path)
    for path, _ in other_folders(folder):
        if now_seconds - path.stat().st_mtime > _UNUSED_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def other_folders(folder: Path) -> list[tuple[Path, int]]:
    """Folders beside this one with kernels of other versions, and their sizes in bytes."""
    return [
        (path, sum(file.lstat().st_size for file in path.rglob("*") if file.is_file()))
        for path in sorted(folder.parent.glob("kernels-" + "[0-9a-f]" * 16))
        if path != folder and path.is_dir() and not path.is_symlink()
    ]


def _kernels(files: Iterable[str]) -> Iterator[tuple[str, Any]]:
    """The kernels of some files that can be called, with their names, in the order of `ALL`."""
    wanted = frozenset(files)
    for file in (one for one in ALL if one in wanted):
        module = import_module(f"{_PACKAGE}.{file}")
        for name, value in vars(module).items():
            if isinstance(value, Dispatcher) and not name.startswith("_"):
                function: Any = value
                if function.py_func.__module__ == module.__name__:
                    yield f"{file}.{name}", function
