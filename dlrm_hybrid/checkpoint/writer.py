"""Writes one rank's shard of a checkpoint, in a thread while the rank trains on.

Files are in the safetensors format, written without a copy of the bytes in memory, which that
library would make: the length of a header in 8 bytes, the header as JSON, the elements of all
tensors, concatenated (github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from dlrm_hybrid.checkpoint.commit import Shard
from dlrm_hybrid.checkpoint.folder import key_of, partial_folder, unwritten
from dlrm_hybrid.disk import Content, write
from dlrm_hybrid.model.row_storage import IN_MEMORY, RowStorage
from dlrm_hybrid.model.tensors import Piece, in_groups
from dlrm_hybrid.parallel.finite import first_not_finite
from dlrm_hybrid.types import DlrmError

T = TypeVar("T")

SUFFIX = ".safetensors"
DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@final
@dataclass(slots=True, kw_only=True)
class ShardWriter:
    """Writes the shards of one rank, one checkpoint at a time.

    Attributes:
        root: the `checkpoints` folder of the run.
        attempt: how often the run has been restarted.
        storage: storage of table rows; if larger than memory, `begin` writes before it returns.
        place: for messages, see `unwritten`.
    """

    root: Path
    rank: str
    attempt: int
    storage: RowStorage = IN_MEMORY
    place: str | None = None
    # Kept from one checkpoint to the next: filling new memory takes several times as long.
    _copies: dict[str, Tensor] = field(default_factory=dict[str, Tensor], repr=False)
    _shard: Future[Shard] | None = None

    def begin(self, step: int, pieces: Iterable[Piece]) -> None:
        """Copy the pieces of a checkpoint; a thread checks and writes the copies, a file a group.

        Pieces with `is_copy` are left out: another rank saves them.

        Raises:
            DlrmError: the last shard has not been taken yet.
        """
        if self._shard is not None:
            raise DlrmError(f"{self.rank}: step {step} is saved before the last one is written")
        folder = partial_folder(self.root, step, self.attempt)
        saved = [piece for piece in pieces if not piece.is_copy]
        if self.storage.is_paged:
            self._shard = Future()
            with self.storage.reading_all():
                self._shard.set_result(self._write(folder, saved))
            return
        copies = [self._copied(piece) for piece in saved]
        names = {key_of(piece.name, piece.begin, piece.is_full) for piece in saved}
        for name in self._copies.keys() - names:
            del self._copies[name]
        self._shard = in_background(lambda: self._write(folder, copies))

    @property
    def pending(self) -> bool:
        """Whether there is a shard that was not taken yet."""
        return self._shard is not None

    def take(self, wait_seconds: float) -> Shard | None:
        """Take the shard once it is written; None if it is not ready or there is none."""
        if self._shard is None:
            return None
        shard = outcome(self._shard, wait_seconds)
        if shard is not None:
            self._shard = None
        return shard

    def _copied(self, piece: Piece) -> Piece:
        key = key_of(piece.name, piece.begin, piece.is_full)
        copy = self._copies.get(key)
        if copy is None or copy.shape != piece.view.shape or copy.dtype != piece.view.dtype:
            copy = torch.empty(piece.view.shape, dtype=piece.view.dtype)
            self._copies[key] = copy
        copy.copy_(piece.view)
        return replace(piece, view=copy)

    def _write(self, folder: Path, pieces: Sequence[Piece]) -> Shard:
        begun = time.perf_counter()
        not_finite = first_not_finite((piece.name, piece.view) for piece in pieces)
        files: dict[str, dict[str, Any]] = {}
        tensors: dict[str, dict[str, Any]] = {}
        fault: str | None = None
        path = folder
        try:
            if not_finite is None:
                folder.mkdir(parents=True, exist_ok=True)
            groups = dict.fromkeys(piece.group for piece in pieces)
            for group in groups if not_finite is None else ():
                path, some = folder / f"{group}.{self.rank}{SUFFIX}", in_groups(pieces, group)
                views = {key_of(p.name, p.begin, p.is_full): p.view for p in some}
                files[path.name] = asdict(write_tensors(path, views))
                for piece in some:
                    _add_part(tensors, path.name, piece)
        except OSError as error:
            fault = unwritten(self.root, path, error, self.place)
        return Shard(
            files=files,
            tensors=tensors,
            seconds=time.perf_counter() - begun,
            fault=fault,
            not_finite=not_finite,
        )


def _add_part(tensors: dict[str, dict[str, Any]], file: str, piece: Piece) -> None:
    entry: dict[str, Any] = {
        "group": piece.group,
        "dtype": DTYPES[piece.view.dtype],
        "shape": list(piece.shape),
        "parts": [],
    }
    part: dict[str, Any] = {
        "file": file,
        "begin": list(piece.begin),
        "shape": list(piece.view.shape),
    }
    if piece.every > 1:
        part["every"] = piece.every
    tensors.setdefault(piece.name, entry)["parts"].append(part)


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Content:
    """Write a file of contiguous tensors, durably.

    Raises:
        OSError: it cannot be written.
    """
    # Wide elements first, so that all are aligned.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    return write(path, _file_of({name: tensors[name] for name in order}))


def _file_of(tensors: Mapping[str, Tensor]) -> Iterator[memoryview]:
    header: dict[str, dict[str, object]] = {}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield memoryview(len(text).to_bytes(8, "little") + text)
    for tensor in tensors.values():
        if tensor.numel():  # others may have strides of 0, which are no bytes
            yield tensor.view(-1).view(torch.uint8).numpy().data


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a daemon thread, for which the process does not wait at its end."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    Thread(target=run, daemon=True, name="checkpoint").start()
    return future


def outcome(future: Future[T], wait_seconds: float) -> T | None:
    """The result of some work, None if not done in time; raises what the work raised."""
    return future.result() if wait([future], wait_seconds).done else None
