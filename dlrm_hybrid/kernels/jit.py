"""The one decorator of all kernels, and the types that each of them is compiled for.

A kernel is compiled for one list of types, which its annotations say: `int` is int64, `float` is
float64, an array is contiguous and has as many dimensions as the suffix of its name has letters,
one if it has none. So all kernels can be compiled ahead (`kernels.ahead`). A call with other types
compiles what it needs and is no error.

numba does not notice that a function in another file has changed: no kernel calls one of another
file, and the name of the cache folder has a hash over all files (`kernels.cache`).
"""

from __future__ import annotations

import re
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.core.registry import cpu_target

from dlrm_hybrid.kernels.cache import KernelCache

Function = TypeVar("Function", bound=Callable[..., Any])

READ_ONLY = "read-only"
ReadOnlyBytes = Annotated[npt.NDArray[np.uint8], READ_ONLY]
_SHAPE = re.compile(r"_([A-Z][A-Z0-9]*)$")
_SCALARS: dict[Any, Any] = {int: types.int64, float: types.float64, bool: types.boolean}


def kernel(function: Function) -> Function:
    """Compile `function` without the interpreter lock; keeps its declared type for callers.

    One whose name begins with an underscore is for kernels of its file only: it cannot be called
    from Python, and is compiled and kept as a part of them.
    """
    is_part = function.__name__.startswith("_")
    # No C function is ever made of a kernel, and each one would be compiled as well.
    compiled: Any = numba.njit(nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=is_part)(
        function
    )
    if not is_part:
        file = function.__module__.rpartition(".")[2]
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
