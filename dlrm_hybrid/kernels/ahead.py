"""Which kernels are compiled, and compiling those that are not; `needs` says which a run needs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from numba.core.dispatcher import Dispatcher

from dlrm_hybrid.kernels.cache import UnfitError, drop, kernel_path, read_kernel
from dlrm_hybrid.kernels.jit import argument_types, import_numba
from dlrm_hybrid.kernels.needs import ALL

_PACKAGE = "dlrm_hybrid.kernels"
_UNUSED_SECONDS = 30 * 86_400.0


@dataclass(frozen=True, slots=True)
class State:
    """What is there of some files of kernels.

    Attributes:
        missing: files, by name, of which a kernel is not compiled yet, the largest first.
        compiled: kernels that are there.
        kernels: kernels of these files.
        num_bytes: of those that are there.
        damaged: files of the cache that could not be used, with the reason; they are removed.
    """

    missing: tuple[str, ...]
    compiled: int
    kernels: int
    num_bytes: int
    damaged: tuple[str, ...]


def look(folder: Path, names: Iterable[str]) -> State:
    """See what is compiled in a folder; files that must not be used are removed."""
    missing: list[str] = []
    damaged: list[str] = []
    compiled = kernels = num_bytes = 0
    wanted = frozenset(names)
    for file in (name for name in ALL if name in wanted):
        is_complete = True
        for name, function in _kernels(file):
            kernels += 1
            path = kernel_path(folder, name, argument_types(function.py_func))
            try:
                payload = read_kernel(path)
            except UnfitError as error:
                damaged.append(f"{path}: {error}")
                drop(path)
                payload = None
            is_complete &= payload is not None
            compiled += payload is not None
            num_bytes += len(payload or b"")
        if not is_complete:
            missing.append(file)
    return State(tuple(missing), compiled, kernels, num_bytes, tuple(damaged))


def compile_file(name: str) -> None:
    """Compile what is not yet compiled of one file, and keep it."""
    import_numba()
    for _, function in _kernels(name):
        function.compile(argument_types(function.py_func))


def serve() -> None:
    """Body of a process: compile each file that a line of stdin names, and repeat the line."""
    for line in sys.stdin:
        compile_file(line.strip())
        sys.stdout.write(line)
        sys.stdout.flush()


def unforeseen(names: Collection[str]) -> list[str]:
    """Kernels that this process has called, though they are not compiled ahead for its run.

    Args:
        names: files that are compiled ahead.
    """
    return [
        name
        for file in ALL
        if f"{_PACKAGE}.{file}" in sys.modules
        for name, function in _kernels(file)
        if not {argument_types(function.py_func)} >= set(function.signatures)
        or (function.signatures and file not in names)
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


def _kernels(file: str) -> Iterator[tuple[str, Any]]:
    """The kernels of a file that can be called, with their names."""
    module = import_module(f"{_PACKAGE}.{file}")
    for name, value in vars(module).items():
        if isinstance(value, Dispatcher) and not name.startswith("_"):
            function: Any = value
            if function.py_func.__module__ == module.__name__:
                yield f"{file}.{name}", function
