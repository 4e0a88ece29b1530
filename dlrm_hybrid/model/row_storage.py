"""Storage of table rows: in memory, or in files that the kernel caches as far as it can.

Shapes: R rows, C columns, K rows of a batch.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.host import CPU
from dlrm_hybrid.types import ResourceError

FOLDER_KEY = "embedding.folder"
FLOAT_BYTES = 4
READERS = 8  # a disk that serves one page in 66 µs serves eight at once in 160
FEWEST_ROWS = 32  # for each reader


class RowStorage(Protocol):
    """Makes tensors of rows, and reads rows scattered over them."""

    @property
    def is_paged(self) -> bool:
        """Whether its tensors may be larger than memory, so nobody should copy them."""
        ...

    def zeros(self, rows: int, columns: int) -> Tensor:
        """Make a contiguous float32 tensor (R, C) of zeros.

        Raises:
            ResourceError: there is no space for it; names the bytes, the folder and its key.
        """
        ...

    def look_up(self, rows_RC: Tensor, rows_K: Tensor) -> Tensor:
        """Copy some rows of a tensor made by `zeros`."""
        ...

    def touch(self, rows_RC: Tensor, rows_K: Tensor) -> None:
        """Bring rows into memory that are about to be changed."""
        ...

    def reading_all(self) -> AbstractContextManager[None]:
        """A context for reading all tensors from beginning to end."""
        ...


@final
@dataclass(frozen=True, slots=True)
class InMemory(RowStorage):
    """Rows in the memory of the process, or of a device."""

    device: torch.device = CPU

    @property
    @override
    def is_paged(self) -> bool:
        return False

    @override
    def zeros(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, device=self.device)

    @override
    def look_up(self, rows_RC: Tensor, rows_K: Tensor) -> Tensor:
        return rows_RC.index_select(0, rows_K)

    @override
    def touch(self, rows_RC: Tensor, rows_K: Tensor) -> None:
        pass

    @override
    def reading_all(self) -> AbstractContextManager[None]:
        return nullcontext()


IN_MEMORY = InMemory()


@final
@dataclass(frozen=True, slots=True, eq=False)
class InFiles(RowStorage):
    """Rows in mapped files, one per tensor.

    The files have no names, so the kernel removes them when the process ends, however that happens.

    Attributes:
        folder: folder of the files; made if missing.
    """

    folder: Path
    _maps: list[mmap.mmap] = field(default_factory=list[mmap.mmap], repr=False)
    _readers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(READERS, "rows"), repr=False
    )

    @property
    @override
    def is_paged(self) -> bool:
        return bool(self._maps)

    @override
    def zeros(self, rows: int, columns: int) -> Tensor:
        num_bytes = FLOAT_BYTES * rows * columns
        if num_bytes == 0:
            return torch.zeros(rows, columns)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with TemporaryFile(dir=self.folder) as file:
                # Reserved: on a full disk a write to a mapped page would kill the process.
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                memory = mmap.mmap(file.fileno(), num_bytes)
        except OSError as error:
            raise ResourceError(
                f"{self.folder}: no file of {num_bytes:,} bytes for rows of tables: "
                f"{error.strerror} ({FOLDER_KEY}; null is the run folder)"
            ) from error
        memory.madvise(mmap.MADV_RANDOM)
        self._maps.append(memory)
        return torch.frombuffer(memory, dtype=torch.float32).view(rows, columns)

    @override
    def look_up(self, rows_RC: Tensor, rows_K: Tensor) -> Tensor:
        if len(rows_K) <= FEWEST_ROWS:
            return rows_RC.index_select(0, rows_K)
        out_KC = rows_RC.new_empty(len(rows_K), rows_RC.shape[1])
        size = max(FEWEST_ROWS, -(-len(rows_K) // READERS))
        parts = [slice(first, first + size) for first in range(0, len(rows_K), size)]
        tasks = [
            self._readers.submit(torch.index_select, rows_RC, 0, rows_K[part], out=out_KC[part])
            for part in parts
        ]
        for task in tasks:
            task.result()
        return out_KC

    @override
    def touch(self, rows_RC: Tensor, rows_K: Tensor) -> None:
        self.look_up(rows_RC, rows_K)

    @override
    @contextmanager
    def reading_all(self) -> Generator[None, None, None]:
        self._advise(mmap.MADV_SEQUENTIAL)
        try:
            yield
        finally:
            self._advise(mmap.MADV_RANDOM)

    def _advise(self, advice: int) -> None:
        for memory in self._maps:
            memory.madvise(advice)
