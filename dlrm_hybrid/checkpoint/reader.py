"""Reads tensors of checkpoints, in any layout, for any number of ranks and any compressors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any, cast, final

import safetensors
import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.folder import instead_of, key_of, read
from dlrm_hybrid.checkpoint.manifest import Manifest, TensorBox, TensorEntry
from dlrm_hybrid.checkpoint.writer import DTYPES
from dlrm_hybrid.disk import Content, content, plain_file
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.finite import first_not_finite
from dlrm_hybrid.types import DataError, Group

OnRead = Callable[[int, int], None]
"""Called with the number of bytes of a file verified so far, and its size."""

Overlap = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Slices of a part of a checkpoint, and of a piece of a tensor."""

BLOCK_ELEMENTS = 1 << 23  # read at once
TYPES = {title: dtype for dtype, title in DTYPES.items()}


@final
@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint; each file is verified before anything of it is used.

    Attributes:
        progress: called while a file is verified.
        fresh: ids, int64 (K,), of rows that `fill` leaves as they are, by name of the table; not
            None if tables may have more rows than saved, which `fill` leaves as well.
    """

    folder: Path
    manifest: Manifest
    progress: OnRead | None = None
    fresh: Mapping[str, Tensor] | None = None
    _opened: dict[str, Any] = field(default_factory=dict[str, Any], repr=False)

    def names(self, *groups: str) -> list[str]:
        """Names of the checkpoint's tensors in these groups."""
        return [name for name, entry in self.manifest.tensors.items() if entry.group in groups]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Read those of these tensors that are there; raises DataError as `fill`."""
        return {name: self.tensor(name) for name in names if name in self.manifest.tensors}

    def tensor(self, name: str) -> Tensor:
        """Read a full tensor; raises DataError as `fill`."""
        entry = self.manifest.tensors[name]
        for part in entry.parts:
            self._open(part.file)  # verifies it before memory is allocated
        tensor = torch.empty(entry.shape, dtype=TYPES[entry.dtype])
        self.fill(full_pieces({name: tensor}))
        return tensor

    def fill(self, pieces: Iterable[Piece]) -> None:
        """Fill pieces of tensors, in whatever pieces they were saved.

        Raises:
            DataError: a file is missing, changed or misfit, or a value not finite; names them.
        """
        for piece in pieces:
            self._fill(piece)

    def _fill(self, piece: Piece) -> None:
        entry = self.manifest.tensors.get(piece.name)
        if entry is None:
            raise DataError(f"{self.folder}: no tensor {piece.name} in this checkpoint")
        dtype = TYPES[entry.dtype]
        shape = entry.shape
        is_table = piece.group is Group.EMBEDDINGS
        if self.fresh is not None and is_table and piece.shape[:1] > shape[:1]:
            shape = (*piece.shape[:1], *shape[1:])
        if shape != piece.shape or dtype != piece.view.dtype:
            raise DataError(
                f"{self.folder}: {piece.name} is {dtype} {list(entry.shape)}, "
                f"the model's is {piece.view.dtype} {list(piece.shape)}"
            )
        fresh_K = self._fresh_rows(piece)
        kept_K = piece.view[fresh_K] if len(fresh_K) else None
        for part in entry.parts:
            overlap = _overlap(piece, part)
            key = key_of(piece.name, part.begin, part.shape == entry.shape)
            for theirs, ours in () if overlap is None else _in_blocks(overlap, piece):
                values = self._read(entry, part, key, theirs)
                if first_not_finite([(piece.name, values)]) is not None:
                    raise DataError(
                        f"{self.folder / part.file}: {piece.name} holds values that are not "
                        f"finite{instead_of(self.folder)}"
                    )
                piece.view[ours].copy_(values)
        if kept_K is not None:
            piece.view[fresh_K] = kept_K

    def _fresh_rows(self, piece: Piece) -> Tensor:
        """The rows of a piece's view that stay as they are, int64 (K,)."""
        ids_K = (self.fresh or {}).get(piece.name.rpartition(".")[0])
        if ids_K is None:
            return torch.empty(0, dtype=torch.int64)
        places_K = ids_K - piece.begin[0]
        rows_K = places_K[places_K % piece.every == 0] // piece.every
        return rows_K[(rows_K >= 0) & (rows_K < len(piece.view))]

    def _read(
        self, entry: TensorEntry, part: TensorBox, key: str, box: tuple[slice, ...]
    ) -> Tensor:
        path, opened = self.folder / part.file, self._open(part.file)
        try:
            slices = opened.get_slice(key)
            dtype, shape = slices.get_dtype(), tuple(slices.get_shape())
            if (dtype, shape) != (entry.dtype, part.shape):
                raise DataError(
                    f"{path}: {key} is {dtype} {list(shape)}, the manifest says {entry.dtype} "
                    f"{list(part.shape)}"
                )
            if not box:  # a scalar has no slices
                return opened.get_tensor(key)
            rows, *rest = box  # safetensors reads consecutive rows only
            return slices[slice(rows.start, rows.stop), *rest][:: rows.step or 1]
        except safetensors.SafetensorError as error:
            raise DataError(f"{path}: {key}: {error}") from error

    def _open(self, file: str) -> Any:
        """Open a file of tensors, mapped; size, checksum and header are checked once."""
        if file not in self._opened:
            path = self._verified(file)
            try:
                self._opened[file] = cast(Any, safetensors.safe_open)(path, framework="pt")
            except safetensors.SafetensorError as error:
                raise DataError(f"{path}: {error}") from error
        return self._opened[file]

    def _verified(self, file: str) -> Path:
        """Verify a file's size and checksum against the manifest; returns its path."""
        path, instead = self.folder / file, instead_of(self.folder)
        entry = self.manifest.files[file]
        expected = Content(entry.num_bytes, entry.xxh3)
        try:
            actual = content(
                plain_file(self.folder, file, instead),
                lambda done: self.progress and self.progress(done, expected.num_bytes),
            )
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}{instead}") from error
        if actual != expected:
            raise DataError(
                f"{path}: {actual.num_bytes} bytes with checksum {actual.xxh3}, the manifest says "
                f"{expected.num_bytes} with {expected.xxh3}{instead}"
            )
        return path


def open_checkpoint(
    folder: Path,
    progress: OnRead | None = None,
    *,
    fresh: Mapping[str, Tensor] | None = None,
) -> Checkpoint:
    """Read the manifest of a complete checkpoint; raises DataError if there is none."""
    return Checkpoint(folder, read(folder), progress, fresh)


def _in_blocks(overlap: Overlap, piece: Piece) -> Iterator[Overlap]:
    """Split an overlap into blocks that need little memory."""
    theirs, ours = overlap
    if not theirs:
        yield overlap
        return
    rows = [range(x.start, x.stop, x.step or 1) for x in (theirs[0], ours[0])]
    most = max(1, BLOCK_ELEMENTS * len(piece.view) // max(1, piece.view.numel()))
    for first in range(0, len(rows[0]), most):
        some = [x[first : first + most] for x in rows]
        (theirs_rows, ours_rows) = (slice(x.start, x.stop, x.step) for x in some)
        yield (theirs_rows, *theirs[1:]), (ours_rows, *ours[1:])


def _overlap(piece: Piece, part: TensorBox) -> Overlap | None:
    """The intersection of a piece and a part: its slices of the part, and of the piece."""
    theirs: list[slice] = []
    ours: list[slice] = []
    for dim, (begin, length) in enumerate(zip(piece.begin, piece.view.shape, strict=True)):
        every, part_every = (piece.every, part.every) if dim == 0 else (1, 1)
        rows = range(begin, begin + every * length, every)
        saved = range(part.begin[dim], part.begin[dim] + part_every * part.shape[dim], part_every)
        common = _common(rows, saved)
        if not common and length:
            return None
        ours.append(_places(common, rows))
        theirs.append(_places(common, saved))
    return tuple(theirs), tuple(ours)


def _common(left: range, right: range) -> range:
    """The numbers in both of two increasing ranges."""
    step = lcm(left.step, right.step)
    skipped = max(0, -(-(right.start - left.start) // left.step))
    near = left[skipped : skipped + step // left.step]
    first = next((number for number in near if number in right), None)
    if first is None:
        return range(0)
    return range(first, min(left.stop, right.stop), step)


def _places(some: range, among: range) -> slice:
    """The slice of some numbers within others that include them."""
    if not some:
        return slice(0, 0)
    return slice(among.index(some[0]), among.index(some[-1]) + 1, some.step // among.step)
