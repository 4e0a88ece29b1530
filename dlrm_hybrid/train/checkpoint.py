"""Reads the tensors of checkpoints, however they lie in their files; writing is `shard_writer`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import safetensors
import torch
from torch import Tensor

from dlrm_hybrid.model.pieces import Piece, whole
from dlrm_hybrid.parallel.finite import first_not_finite
from dlrm_hybrid.train.checkpoint_folder import instead_of, key_of, read_facts
from dlrm_hybrid.train.durable import Content, content
from dlrm_hybrid.train.tensor_file import DTYPES
from dlrm_hybrid.types import DataError

TYPES = {title: dtype for dtype, title in DTYPES.items()}


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint; a file is checked before anything of it is used.

    Attributes:
        folder: where it lies.
        facts: its manifest.
    """

    folder: Path
    facts: Mapping[str, Any]
    _checked: set[str] = field(default_factory=set[str], repr=False)

    def names(self, group: str) -> list[str]:
        """Of the tensors of a group; none if it has no such group."""
        tensors: Mapping[str, Mapping[str, Any]] = self.facts["tensors"]
        return [name for name, told in tensors.items() if told["group"] == group]

    def tensor(self, name: str) -> Tensor:
        """A whole tensor in memory of its own; raises DataError as `fill`."""
        told = self.facts["tensors"][name]
        tensor = torch.empty(told["shape"], dtype=TYPES[told["dtype"]])
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
        told: Mapping[str, Any] | None = self.facts["tensors"].get(piece.name)
        if told is None:
            raise DataError(f"{self.folder}: no tensor {piece.name} in this checkpoint")
        dtype, shape = TYPES[told["dtype"]], tuple(told["shape"])
        if shape != piece.shape or dtype != piece.view.dtype:
            raise DataError(
                f"{self.folder}: {piece.name} is {dtype} {list(shape)}, "
                f"the model's is {piece.view.dtype} {list(piece.shape)}"
            )
        for part in told["parts"]:
            overlap = _overlap(piece, part)
            if overlap is not None:
                theirs, ours = overlap
                key = key_of(piece.name, part["begin"], part["shape"] == told["shape"])
                values = self._read(part["file"], key, theirs)
                if first_not_finite([(piece.name, values)]) is not None:
                    raise DataError(
                        f"{self.folder / part['file']}: {piece.name} holds values that are not "
                        f"finite{instead_of(self.folder)}"
                    )
                piece.view[ours].copy_(values)

    def _read(self, file: str, key: str, place: tuple[slice, ...]) -> Tensor:
        path = self.folder / file
        self._check(path)
        with cast(Any, safetensors.safe_open)(path, framework="pt") as opened:
            # A scalar has no slices.
            return opened.get_slice(key)[place] if place else opened.get_tensor(key)

    def _check(self, path: Path) -> None:
        """Compare a file with what the manifest says of it, once."""
        if path.name in self._checked:
            return
        expected = Content(**self.facts["files"][path.name])
        try:
            found = content(path)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}{instead_of(self.folder)}") from error
        if found != expected:
            raise DataError(
                f"{path}: {found.num_bytes} bytes with checksum {found.xxh3}, the manifest says "
                f"{expected.num_bytes} with {expected.xxh3}{instead_of(self.folder)}"
            )
        self._checked.add(path.name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the manifest of a complete checkpoint; raises DataError if it is none."""
    return Checkpoint(folder, read_facts(folder))


def load(folder: Path, groups: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Copy the tensors of a checkpoint into `groups`, which must have the same names and shapes.

    Raises:
        DataError: a file is missing, changed or does not fit; the message names file and tensor.
    """
    checkpoint = open_checkpoint(folder)
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
    return {name: checkpoint.tensor(name) for name in names if name in checkpoint.facts["tensors"]}


def _overlap(
    piece: Piece, part: Mapping[str, Any]
) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
    """What a piece and a part have in common: where in the part, and where in the piece."""
    theirs: list[slice] = []
    ours: list[slice] = []
    for dim, (begin, length) in enumerate(zip(piece.begin, piece.view.shape, strict=True)):
        part_begin: int = part["begin"][dim]
        part_length: int = part["shape"][dim]
        first = max(begin, part_begin)
        last = min(begin + length, part_begin + part_length)
        if first >= last and length:
            return None
        theirs.append(slice(first - part_begin, last - part_begin))
        ours.append(slice(first - begin, last - begin))
    return tuple(theirs), tuple(ours)
