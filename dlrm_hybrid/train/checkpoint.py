"""Writes and reads the tensors of checkpoints; `checkpoint_folder` says what lies where.

A folder is written under another name, flushed to the disk and renamed; `latest` moves after.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import safetensors
import safetensors.torch
import xxhash
from torch import Tensor

from dlrm_hybrid.train.checkpoint_folder import (
    BEST_FILE,
    FORMAT,
    LATEST_FILE,
    MANIFEST_FILE,
    Keeping,
    best,
    instead_of,
    name,
    prune,
    read_facts,
)
from dlrm_hybrid.types import DataError, ResourceError

CHUNK_BYTES = 1 << 24

Groups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on the disk."""

    folder: Path
    num_bytes: int


def save(root: Path, step: int, groups: Groups, facts: Mapping[str, Any], keep: Keeping) -> Saved:
    """Write the checkpoint of `step` below `root`, let `latest` name it, drop those not to be kept.

    A complete checkpoint of the same step is left as it is: a step has one state.

    Args:
        root: the `checkpoints` folder of a run.
        step: training steps done.
        groups: tensors by name, by file.
        facts: whatever else a resumed run needs, as JSON values; under `test_loss` what the
            checkpoint is worth, None where it was not evaluated.
        keep: which checkpoints stay, this one included.

    Raises:
        ResourceError: the disk is full or not writable; older checkpoints are intact.
    """
    folder = root / name(step)
    try:
        root.mkdir(parents=True, exist_ok=True)
        if not (folder / MANIFEST_FILE).exists():
            _write_folder(folder, step, groups, facts)
        _replace_text(root / LATEST_FILE, folder.name + "\n")
        best_folder = best(root) if keep.best else None
        if best_folder is not None:
            _replace_text(root / BEST_FILE, best_folder.name + "\n")
        else:
            (root / BEST_FILE).unlink(missing_ok=True)  # what it named may go now
        prune(root, keep)
    except (OSError, safetensors.SafetensorError) as error:
        raise ResourceError(f"{folder}: the checkpoint cannot be written: {error}") from error
    return Saved(folder, sum(path.stat().st_size for path in folder.iterdir()))


def load(folder: Path, groups: Groups) -> None:
    """Copy the tensors of a checkpoint into `groups`, which must have the same names and shapes.

    Raises:
        DataError: a file is missing, changed or does not fit; the message names file and tensor.
    """
    files: Mapping[str, Mapping[str, Any]] = read_facts(folder)["files"]
    for group, tensors in groups.items():
        path = folder / f"{group}.safetensors"
        if path.name not in files:
            raise DataError(f"{path}: not in this checkpoint, which has {', '.join(files)}")
        _verify(path, files[path.name])
        _copy_into(path, tensors)


def read_all(folder: Path, groups: Sequence[str]) -> dict[str, Tensor]:
    """All tensors of those of the files that a checkpoint has; raises DataError as `load`."""
    files: Mapping[str, Mapping[str, Any]] = read_facts(folder)["files"]
    tensors: dict[str, Tensor] = {}
    for group in groups:
        if f"{group}.safetensors" in files:
            tensors |= read(folder, group)
    return tensors


def read(folder: Path, group: str) -> dict[str, Tensor]:
    """All tensors of one file of a checkpoint; raises DataError as `load`."""
    path = folder / f"{group}.safetensors"
    files: Mapping[str, Mapping[str, Any]] = read_facts(folder)["files"]
    if path.name not in files:
        raise DataError(f"{path}: not in this checkpoint, which has {', '.join(files)}")
    _verify(path, files[path.name])
    return safetensors.torch.load_file(path)


def _write_folder(folder: Path, step: int, groups: Groups, facts: Mapping[str, Any]) -> None:
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)  # without a manifest: a removal cut short
    partial.mkdir()
    files: dict[str, dict[str, Any]] = {}
    for group, tensors in groups.items():
        path = partial / f"{group}.safetensors"
        safetensors.torch.save_file(dict(tensors), path)
        _flush(path)
        files[path.name] = {"bytes": path.stat().st_size, "xxh3": _checksum(path)}
    manifest = {"format": FORMAT, "step": step, "files": files, **facts}
    _replace_text(partial / MANIFEST_FILE, json.dumps(manifest, indent=1))
    partial.rename(folder)
    _flush(folder.parent)


def _verify(path: Path, entry: Mapping[str, Any]) -> None:
    fault = _fault(path, entry)
    if fault is not None:
        raise DataError(f"{path}: {fault}{instead_of(path.parent)}")


def _fault(path: Path, entry: Mapping[str, Any]) -> str | None:
    """How a file differs from what its manifest says of it."""
    try:
        num_bytes = path.stat().st_size
        if num_bytes != entry["bytes"]:
            return f"{num_bytes} bytes, the manifest says {entry['bytes']}"
        checksum = _checksum(path)
        if checksum != entry["xxh3"]:
            return f"checksum {checksum}, the manifest says {entry['xxh3']}"
    except OSError as error:
        return error.strerror
    return None


def _copy_into(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with cast(Any, safetensors.safe_open)(path, framework="pt") as file:
        names: set[str] = set(file.keys())
        if names != set(tensors):
            odd = sorted(names ^ set(tensors))
            raise DataError(f"{path}: other tensors than the model's, first {odd[0]}")
        for title, tensor in tensors.items():
            value: Tensor = file.get_tensor(title)
            if value.shape != tensor.shape or value.dtype != tensor.dtype:
                raise DataError(
                    f"{path}: {title} is {value.dtype} {list(value.shape)}, "
                    f"the model's is {tensor.dtype} {list(tensor.shape)}"
                )
            tensor.detach().copy_(value)


def _checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _replace_text(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    _flush(partial)
    partial.replace(path)
    _flush(path.parent)


def _flush(path: Path) -> None:
    """Make a file, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
