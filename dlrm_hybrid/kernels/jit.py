"""The one decorator of all kernels: compiled ahead of their first call, cached between processes.

numba does not notice that a function in another file changed; so no kernel calls one of another
file, and the cache folder carries a hash over all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import config as numba_config
from numba.core.registry import cpu_target

Function = TypeVar("Function", bound=Callable[..., Any])


def cache_directory() -> Path:
    """Where compiled kernels lie: one folder per version of the sources and of numba."""
    digest = hashlib.blake2b(numba.__version__.encode(), digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path.home() / ".cache" / "dlrm_hybrid" / f"kernels-{digest.hexdigest()}"


def kernel(function: Function) -> Function:
    """Compile `function` without the interpreter lock; keeps its declared type for callers."""
    if not numba_config.CACHE_DIR:
        numba_config.CACHE_DIR = str(cache_directory())
    return cast(Function, numba.njit(cache=True, nogil=True)(function))


def import_numba() -> None:
    """Bring the 200 modules that numba imports before it loads its first kernel from the cache."""
    cpu_target.target_context.refresh()
