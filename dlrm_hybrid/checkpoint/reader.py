"""Reads the tensors of checkpoints, however they lie in their files; writing is `shard_writer`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import safetensors
import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.folder import instead_of, key_of, read
from dlrm_hybrid.checkpoint.manifest import Manifest, Part, TensorEntry
from dlrm_hybrid.checkpoint.tensor_file import DTYPES
from dlrm_hybrid.disk import plain_file
from dlrm_hybrid.durable import Content, content
from dlrm_hybrid.model.tensors import Piece, whole
from dlrm_hybrid.parallel.finite import first_not_finite
from dlrm_hybrid.types import DataError

# Called with how many bytes of how many of a file have been checked.
Tell = Callable[[int, int], None]
TYPES = {title: dtype for dtype, title in DTYPES.items()}


def _nothing(done: int, total: int) -> None:
    """Nobody waits for it."""


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint; a file is checked before anything of it is used.

    Attributes:
        folder: where it lies.
        manifest: what it says of itself.
        tell: hears how far the check of a file is.
    """

    folder: Path
    manifest: Manifest
    tell: Tell = _nothing
    _checked: set[str] = field(default_factory=set[str], repr=False)

    def names(self, group: str) -> list[str]:
        """Of the tensors of a group; none if it has no such group."""
        return [name for name, told in self.manifest.tensors.items() if told.group == group]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in memory of its own; raises DataError as `fill`."""
        told = self.manifest.tensors[name]
        for part in told.parts:
            self._check(part.file)  # before memory is taken for what it may not have
        tensor = torch.empty(told.shape, dtype=TYPES[told.dtype])
        self.fill(whole({name: tensor}))
        return tensor

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Overwrite pieces of tensors, whatever pieces others have saved.

        Raises:
            DataError: a file is missing, changed or does not fit, or a value is not finite; names
                file and tensor.
        """
        for piece in pieces:
            self._fill(piece)

    def _fill(self, piece: Piece) -> None:
        told = self.manifest.tensors.get(piece.name)
        if told is None:
            raise DataError(f"{self.folder}: no tensor {piece.name} in this checkpoint")
        dtype = TYPES[told.dtype]
        if told.shape != piece.shape or dtype != piece.view.dtype:
            raise DataError(
                f"{self.folder}: {piece.name} is {dtype} {list(told.shape)}, "
                f"the model's is {piece.view.dtype} {list(piece.shape)}"
            )
        for part in told.parts:
            overlap = _overlap(piece, part)
            if overlap is not None:
                theirs, ours = overlap
                key = key_of(piece.name, part.begin, part.shape == told.shape)
                values = self._read(told, part, key, theirs)
                if first_not_finite([(piece.name, values)]) is not None:
                    raise DataError(
                        f"{self.folder / part.file}: {piece.name} holds values that are not "
                        f"finite{instead_of(self.folder)}"
                    )
                piece.view[ours].copy_(values)

    def _read(self, told: TensorEntry, part: Part, key: str, place: tuple[slice, ...]) -> Tensor:
        path = self._check(part.file)
        try:
            with cast(Any, safetensors.safe_open)(path, framework="pt") as opened:
                found = opened.get_slice(key)
                dtype, shape = found.get_dtype(), tuple(found.get_shape())
                if (dtype, shape) != (told.dtype, part.shape):
                    raise DataError(
                        f"{path}: {key} is {dtype} {list(shape)}, the manifest says {told.dtype} "
                        f"{list(part.shape)}"
                    )
                # A scalar has no slices.
                return found[place] if place else opened.get_tensor(key)
        except safetensors.SafetensorError as error:
            raise DataError(f"{path}: {key}: {error}") from error

    def _check(self, file: str) -> Path:
        """Compare a file with what the manifest says of it, once; returns its path."""
        path = self.folder / file
        if file in self._checked:
            return path
        instead = instead_of(self.folder)
        entry = self.manifest.files[file]
        expected = Content(entry.num_bytes, entry.xxh3)
        try:
            found = content(
                plain_file(self.folder, file, instead),
                lambda done: self.tell(done, expected.num_bytes),
            )
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}{instead}") from error
        if found != expected:
            raise DataError(
                f"{path}: {found.num_bytes} bytes with checksum {found.xxh3}, the manifest says "
                f"{expected.num_bytes} with {expected.xxh3}{instead}"
            )
        self._checked.add(file)
        return path


def open_checkpoint(folder: Path, tell: Tell = _nothing) -> Checkpoint:
    """Read the manifest of a complete checkpoint; raises DataError if it is none."""
    return Checkpoint(folder, read(folder), tell)


def load(folder: Path, groups: Mapping[str, Mapping[str, Tensor]], tell: Tell = _nothing) -> None:
    """Copy the tensors of a checkpoint into `groups`, which must have the same names and shapes.

    Args:
        folder: of the checkpoint.
        groups: tensors by name, by group.
        tell: hears how far the check of each file is.

    Raises:
        DataError: a file is missing, changed or does not fit; the message names file and tensor.
    """
    checkpoint = open_checkpoint(folder, tell)
    for group, tensors in groups.items():
        odd = sorted(set(checkpoint.names(group)) ^ set(tensors))
        if odd:
            raise DataError(f"{folder}: {group}: other tensors than the model's, first {odd[0]}")
        checkpoint.fill(whole(tensors))


def read_all(folder: Path, groups: Sequence[str]) -> dict[str, Tensor]:
    """All tensors of those of the groups that a checkpoint has; raises DataError as `load`."""
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name) for group in groups for name in checkpoint.names(group)}


def read_some(folder: Path, names: Collection[str]) -> dict[str, Tensor]:
    """Those of these tensors that a checkpoint has; raises DataError as `load`."""
    checkpoint = open_checkpoint(folder)
    return {name: checkpoint.tensor(name) for name in names if name in checkpoint.manifest.tensors}


def _overlap(piece: Piece, part: Part) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a piece and a part have in common: where in the part, and where in the piece."""
    theirs: list[slice] = []
    ours: list[slice] = []
    for dim, (begin, length) in enumerate(zip(piece.begin, piece.view.shape, strict=True)):
        part_begin: int = part.begin[dim]
        part_length: int = part.shape[dim]
        first = max(begin, part_begin)
        last = min(begin + length, part_begin + part_length)
        if first >= last and length:
            return None
        theirs.append(slice(first - part_begin, last - part_begin))
        ours.append(slice(first - begin, last - begin))
    return tuple(theirs), tuple(ours)
