"""Finds files of rows by name, pattern or folder; reads columns from names of folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import unquote

from dlrm_hybrid.types import ConfigError

_SIGNS = "*?["
_MISSING = "__HIVE_DEFAULT_PARTITION__"


def find(named: str | Sequence[str] | None, key: str) -> tuple[Path, ...]:
    """Resolve names to files; files of a folder or pattern are in alphabetical order.

    A folder stands for all files in it and its subfolders. Names that begin with `_` or `.`, such
    as those that Spark writes beside rows, are skipped unless they are written out.

    Raises:
        ConfigError: nothing matches a pattern, a folder holds no file, or a file is named twice.
    """
    names = [named] if isinstance(named, str) else named or ()
    paths = tuple(path for name in names for path in _meant(name, key))
    by_inode: dict[tuple[int, int], Path] = {}
    for path in paths:
        if not path.exists():
            continue  # its reader reports it
        status = path.stat()
        earlier = by_inode.setdefault((status.st_dev, status.st_ino), path)
        if earlier is not path:
            reason = "named twice" if str(earlier) == str(path) else f"the same file as {earlier}"
            raise ConfigError(f"{key}: {path} is {reason}: each of its rows would count twice")
    return paths


def _meant(name: str, key: str) -> Sequence[Path]:
    path = Path(name)
    if path.is_dir():
        return _files_in(path, key)
    if path.exists() or not any(sign in name for sign in _SIGNS):
        return [path]
    root = Path(path.anchor)
    matches = root.glob(str(path.relative_to(root)))
    if not _is_hidden(path.name):
        parts = set(path.parts)
        matches = (hit for hit in matches if not any(map(_is_hidden, {*hit.parts} - parts)))
    files = [file for hit in matches for file in (_files_in(hit, key) if hit.is_dir() else [hit])]
    if not files:
        raise ConfigError(f"{key} = {name}: no file fits this pattern")
    return sorted(set(files))  # `**` matches a folder and also what is in it


def _files_in(folder: Path, key: str) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise ConfigError(f"{key} = {folder}: {error.filename}: {error.strerror}")

    files: list[Path] = []
    real_paths: set[str] = set()
    for root, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
        real = os.path.realpath(root)
        if real in real_paths:
            raise ConfigError(f"{key} = {folder}: {root}: the same folder as another one in it")
        real_paths.add(real)
        folders[:] = [name for name in folders if not _is_hidden(name)]
        files += (Path(root) / name for name in names if not _is_hidden(name))
    if not files:
        raise ConfigError(f"{key} = {folder}: no file in this folder")
    return sorted(files)


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", ".")) and "=" not in name  # `_day=1` is a column


def below(paths: Sequence[Path]) -> tuple[str, ...]:
    """Paths relative to their deepest common folder; Hive's `name=value` folders are kept."""
    folders = [path.parent.parts for path in paths]
    common = len(os.path.commonprefix(folders))
    while common and "=" in folders[0][common - 1]:
        common -= 1
    return tuple("/".join(path.parts[common:]) for path in paths)


def folder_values(path: Path) -> Mapping[str, str | None]:
    """Columns from names of folders such as `dt=2024-05-01`, which Hive and Spark write."""
    pairs = (part.partition("=") for part in path.parent.parts)
    return {
        unquote(name): None if value == _MISSING else unquote(value)
        for name, sign, value in pairs
        if name and sign
    }
