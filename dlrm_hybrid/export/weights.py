"""Reads weights saved by other programs, without trusting the file, and fits them to a model."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dlrm_hybrid.config.commands import Naming
from dlrm_hybrid.disk import plain_file
from dlrm_hybrid.export.names import names_of, shapes_of, to_ours
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.parallel.finite import first_not_finite
from dlrm_hybrid.types import DataError

KEY = "import.file"
VARIANCE = ".norm.running_var"
STATE = "state_dict"  # key of the weights in files of facebookresearch/dlrm
WRAPPERS = ("module.", "model.")  # prefixes of DataParallel, DLRMTrain and others
EXACT = (torch.float32, torch.float16, torch.bfloat16)  # types that float32 represents exactly
# Allowed for numbers beside the weights, such as an accuracy; else only tensors are unpickled.
NUMPY_SCALARS: tuple[Any, ...] = (
    np.dtype,
    (np.float64(0).__reduce__()[0], "numpy.core.multiarray.scalar"),
    (np.float64(0).__reduce__()[0], "numpy._core.multiarray.scalar"),
    *(type(np.dtype(kind)) for kind in ("f8", "f4", "i8", "i4", "u8", "u1", "?")),
)


def read(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a file, by their names in it.

    Args:
        path: a `.safetensors` file, or one that `torch.save` has written: a state dict, or a dict
            with one as `state_dict`. Tensors are memory-mapped if possible.

    Raises:
        DataError: it is no such file, or damaged; names it.
    """
    plain_file(path.parent, path.name, f" ({KEY})")
    try:
        content = _loaded(path)
    except pickle.UnpicklingError as error:  # torch's message advises to run the file's code
        reason = "it is damaged, or holds objects other than tensors, which could run code"
        raise DataError(f"{path}: cannot be read as weights: {reason} ({KEY})") from error
    except Exception as error:  # untrusted bytes may make a library raise anything
        reason = next((line for line in str(error).splitlines() if line), type(error).__name__)
        raise DataError(f"{path}: cannot be read as weights: {reason} ({KEY})") from error
    if not isinstance(content, Mapping):
        raise DataError(f"{path}: holds a {type(content).__name__}, not tensors by name ({KEY})")
    entries = cast("Mapping[Any, Any]", content)
    if isinstance(inner := entries.get(STATE), Mapping):
        entries = cast("Mapping[Any, Any]", inner)
    foreign = [str(name) for name, value in entries.items() if not isinstance(value, Tensor)]
    if foreign or not entries:
        fault = f"{', '.join(foreign)}: no tensor" if foreign else "holds no tensors"
        raise DataError(f"{path}: {fault} ({KEY})")
    for name, value in entries.items():
        if value.device.type != "cpu" or value.layout is not torch.strided or value.is_nested:
            kind = "nested" if value.is_nested else f"{value.layout} on the device {value.device}"
            raise DataError(f"{path}: {name}: is {kind}, not a dense tensor with values ({KEY})")
    return _unwrapped({str(name): tensor for name, tensor in entries.items()})


def _loaded(path: Path) -> object:
    if path.suffix == ".safetensors":
        return cast(Any, safetensors.torch).load_file(path)
    with warnings.catch_warnings(), torch.serialization.safe_globals(list(NUMPY_SCALARS)):
        warnings.simplefilter("ignore")  # about a pickle, which weights_only refuses
        is_zip = zipfile.is_zipfile(path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


def fitted(
    path: Path, tensors: Mapping[str, Tensor], naming: Naming, spec: ModelShape
) -> dict[str, Tensor]:
    """Convert a file's tensors to a model's float32 weights, by their names here.

    Raises:
        DataError: they do not fit the model; a line for each tensor that is missing, unexpected,
            of another shape or type, or not finite.
    """
    faults = list(_faults(tensors, naming, spec))
    if faults:
        count = "1 tensor does" if len(faults) == 1 else f"{len(faults)} tensors do"
        lines = "".join(f"\n  {fault}" for fault in faults)
        raise DataError(f"{path}: {count} not fit the model ({KEY}, import.names={naming}){lines}")
    ours = to_ours(naming, spec, shapes_of(spec), tensors)
    return {name: tensor.detach().float() for name, tensor in ours.items()}


def _faults(tensors: Mapping[str, Tensor], naming: Naming, spec: ModelShape) -> Iterator[str]:
    shapes = shapes_of(spec)
    expected = {their: shapes[our] for our, their in names_of(naming, spec, shapes).items()}
    for name, shape in expected.items():
        if name not in tensors:
            yield f"{name}: missing, wanted {list(shape)}"
    for name, tensor in tensors.items():
        if name not in expected:
            yield f"{name}: unexpected, {list(tensor.shape)}"
        elif tuple(tensor.shape) != expected[name]:
            yield f"{name}: {list(tensor.shape)}, wanted {list(expected[name])}"
        elif tensor.dtype not in EXACT:
            yield f"{name}: {tensor.dtype}, wanted {', '.join(map(str, EXACT))}"
        elif first_not_finite([(name, tensor)]) is not None:
            yield f"{name}: holds values that are not finite"
        elif name.endswith(VARIANCE) and bool((tensor < 0).any()):
            yield f"{name}: holds a variance below 0"


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the prefixes that wrappers have put before all names."""
    while any(all(name.startswith(prefix) for name in tensors) for prefix in WRAPPERS):
        tensors = {name.partition(".")[2]: tensor for name, tensor in tensors.items()}
    return tensors
