"""Writes what one rank holds of a checkpoint, while the rank goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.background import in_background, outcome
from dlrm_hybrid.checkpoint.folder import key_of, partial_folder, unwritten
from dlrm_hybrid.checkpoint.tensor_file import DTYPES, SUFFIX, write_tensors
from dlrm_hybrid.checkpoint.two_phase import Shard
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.finite import first_not_finite
from dlrm_hybrid.types import DlrmError

Groups = Mapping[str, Sequence[Piece]]


@final
@dataclass(slots=True, kw_only=True)
class ShardWriter:
    """Of one rank; has one checkpoint at a time.

    Attributes:
        root: the `checkpoints` folder of the run.
        rank: name of the rank.
        attempt: how often the run has been restarted.
    """

    root: Path
    rank: str
    attempt: int
    # Kept from one checkpoint to the next: new memory takes several times as long to fill.
    _copies: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)
    _shard: Future[Shard] | None = None

    def begin(self, step: int, groups: Groups) -> None:
        """Copy the pieces of a checkpoint, by group; a thread checks the copies and writes them.

        Raises:
            DlrmError: nobody has asked yet what became of the last one.
        """
        if self._shard is not None:
            raise DlrmError(f"{self.rank}: step {step} is saved before the last one is written")
        copied = {group: [self._copied(piece) for piece in groups[group]] for group in groups}
        names = {key_of(piece.name, piece.begin, piece.is_whole) for piece in _all(groups)}
        for name in self._copies.keys() - names:
            del self._copies[name]
        folder = partial_folder(self.root, step, self.attempt)
        self._shard = in_background(lambda: self._write(folder, copied))

    def take(self, wait_seconds: float) -> Shard | None:
        """What has been written, once; None while it is not, or if there is nothing."""
        if self._shard is None:
            return None
        shard = outcome(self._shard, wait_seconds)
        if shard is not None:
            self._shard = None
        return shard

    def _copied(self, piece: Piece) -> Piece:
        key = key_of(piece.name, piece.begin, piece.is_whole)
        copy = self._copies.get(key)
        if copy is None or copy.shape != piece.view.shape or copy.dtype != piece.view.dtype:
            copy = torch.empty(piece.view.shape, dtype=piece.view.dtype)
            self._copies[key] = copy
        copy.copy_(piece.view)
        return Piece(name=piece.name, shape=piece.shape, begin=piece.begin, view=copy)

    def _write(self, folder: Path, groups: Groups) -> Shard:
        begun = time.perf_counter()
        not_finite = first_not_finite((one.name, one.view) for one in _all(groups))
        if not_finite is not None:
            seconds = time.perf_counter() - begun
            return Shard(files={}, tensors={}, seconds=seconds, fault=None, not_finite=not_finite)
        files: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, Any]] = {}
        fault: str | None = None
        path = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for group, pieces in groups.items():
                path = folder / f"{group}.{self.rank}{SUFFIX}"
                held = {key_of(one.name, one.begin, one.is_whole): one.view for one in pieces}
                files[path.name] = asdict(write_tensors(path, held))
                for piece in pieces:
                    _note(tensors, group, path.name, piece)
        except OSError as error:
            fault = unwritten(self.root, path, error)
        seconds = time.perf_counter() - begun
        return Shard(files=files, tensors=tensors, seconds=seconds, fault=fault)


def _all(groups: Groups) -> list[Piece]:
    return [piece for pieces in groups.values() for piece in pieces]


def _note(tensors: dict[str, dict[str, Any]], group: str, file: str, piece: Piece) -> None:
    whole: dict[str, Any] = {
        "group": group,
        "dtype": DTYPES[piece.view.dtype],
        "shape": list(piece.shape),
        "parts": [],
    }
    part = {"file": file, "begin": list(piece.begin), "shape": list(piece.view.shape)}
    tensors.setdefault(piece.name, whole)["parts"].append(part)
