"""Objects from outside the package by their import path, `MODULE:NAME`."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Any

_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def is_path(name: str) -> bool:
    """Whether a name is an import path."""
    return _PATH.fullmatch(name) is not None


def path_of(target: Any) -> str:
    """The import path of a class or function."""
    return f"{target.__module__}:{target.__qualname__}"


def present(path: str) -> Any:
    """The object of a path whose module is loaded; None if it is not, or has no such object."""
    module, _, names = path.partition(":")
    value: Any = sys.modules.get(module)
    for name in names.split("."):  # a module that loads its parts when asked is not asked
        value = getattr(value, "__dict__", {}).get(name)
    return value


def imported(path: str) -> Any:
    """The object of a path, whose module is imported; None if that has no such object.

    Raises:
        ValueError: the module cannot be imported; says why.
    """
    try:
        importlib.import_module(path.partition(":")[0])
    except (Exception, SystemExit) as error:  # a program of its own ends where it is imported
        is_missing = isinstance(error, ModuleNotFoundError)
        hint = " (neither installed nor in PYTHONPATH)" if is_missing else ""
        raise ValueError(f"cannot be imported: {type(error).__name__}: {error}{hint}") from error
    return present(path)
