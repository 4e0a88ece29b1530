"""Arrays in .npy files: written row after row, with a checksum for each block of rows.

A file begins with numpy's header, padded to 128 bytes, so that numpy, torch, polars and others open
it. The rows follow, little-endian and contiguous. Spilled columns, which are temporary, have no
header.

Shapes: N rows.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedRandom, FileIO
from pathlib import Path
from typing import Annotated, Any, Literal, final

import numpy as np
import numpy.typing as npt
import xxhash
from pydantic import Field

HEADER_BYTES = 128
BLOCK_ROWS = 1 << 13  # rows that share a checksum in the manifest
_MAGIC = b"\x93NUMPY\x01\x00"
_Length = Annotated[int, Field(ge=0, lt=2**48)]
_BlockXxh3 = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredArray:
    """Type, shape and checksums of a .npy file, as the manifest lists them.

    Attributes:
        dtype: type as numpy writes it: `<f4`, `<i4`, `<i8`.
        shape: rows, and values of a row unless the array has one dimension.
        blocks: xxh3-64 of each block of `BLOCK_ROWS` rows without the header; the last is shorter.
    """

    file: str
    dtype: Literal["<f4", "<i4", "<i8"]
    shape: Annotated[tuple[_Length, ...], Field(min_length=1, max_length=2)]
    blocks: tuple[_BlockXxh3, ...]

    @property
    def rows(self) -> int:
        """Number of rows that the array file holds."""
        return self.shape[0]

    @property
    def row_bytes(self) -> int:
        """The bytes that one row takes in the file."""
        return np.dtype(self.dtype).itemsize * int(np.prod(self.shape[1:], dtype=np.int64))

    @property
    def xxh3(self) -> str:
        """xxh3-128 over type, shape and the checksums of all blocks: equal for equal values."""
        return xxhash.xxh3_128_hexdigest(f"{self.dtype}{self.shape}{''.join(self.blocks)}".encode())


@final
class ArrayWriter:
    """Writes a .npy file from rows that come in pieces.

    Args:
        width: values of a row; None for an array of one dimension.
    """

    def __init__(self, path: Path, dtype: npt.DTypeLike, width: int | None = None) -> None:
        self._path = path
        self._dtype = np.dtype(dtype)
        self._width = width
        self._rows = 0
        self._blocks: list[str] = []
        self._digest = xxhash.xxh3_64()
        self._file = path.open("wb", buffering=0)
        _write_all(self._file.fileno(), memoryview(bytes(HEADER_BYTES)))

    def __enter__(self) -> ArrayWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def append(self, rows: Array) -> None:
        """Append rows, which are contiguous and of the file's type."""
        start = 0
        while start < len(rows):
            count = min(len(rows) - start, BLOCK_ROWS - self._rows % BLOCK_ROWS)
            self._digest.update(_bytes(rows[start : start + count]))
            start += count
            self._rows += count
            if self._rows % BLOCK_ROWS == 0:
                self._end_block()
        _write_all(self._file.fileno(), _bytes(rows))

    def finish(self) -> StoredArray:
        """Write the header, flush the file to the disk and describe it."""
        if self._rows % BLOCK_ROWS:
            self._end_block()
        shape = (self._rows,) if self._width is None else (self._rows, self._width)
        os.pwrite(self._file.fileno(), header(self._dtype.str, shape), 0)
        os.fsync(self._file.fileno())
        self._file.close()
        return StoredArray(
            file=self._path.name,
            dtype=self._dtype.str,  # type: ignore[arg-type]
            shape=shape,
            blocks=tuple(self._blocks),
        )

    def _end_block(self) -> None:
        self._blocks.append(self._digest.hexdigest())
        self._digest = xxhash.xxh3_64()


def first_label(label_N: Array) -> Array:
    """The labels (N,) of rows; of rows with several labels each, the first ones."""
    return label_N if label_N.ndim == 1 else label_N[:, 0]


def header(dtype: str, shape: Sequence[int]) -> bytes:
    """The first 128 bytes of a .npy file."""
    text = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {tuple(shape)!r}, }}"
    room = HEADER_BYTES - len(_MAGIC) - 2
    length = room.to_bytes(2, "little")
    return _MAGIC + length + text.ljust(room - 1).encode("ascii") + b"\n"


def file_fault(folder: Path, array: StoredArray) -> str | None:
    """The fault in the size or header of a file; None if both are right."""
    path = folder / array.file
    needed_bytes = HEADER_BYTES + array.rows * array.row_bytes
    try:
        num_bytes = path.stat().st_size
        if num_bytes != needed_bytes:
            return f"{path}: has {num_bytes} bytes, expected {needed_bytes} for {array.rows:,} rows"
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    if head != header(array.dtype, array.shape):
        return f"{path}: its header is not that of {array.dtype} {list(array.shape)}"
    return None


def open_array(folder: Path, array: StoredArray) -> Array:
    """Map the rows of a file into memory, read-only."""
    if array.rows == 0 or array.row_bytes == 0:  # mmap refuses a length of 0
        empty = np.empty(array.shape, array.dtype)
        empty.flags.writeable = False
        return empty
    rows = np.memmap(folder / array.file, array.dtype, "r", HEADER_BYTES, array.shape)
    return np.asarray(rows)


def block_xxh3(rows: Array) -> str:
    """The xxh3-64 of a block of rows."""
    return xxhash.xxh3_64_hexdigest(_bytes(rows))


def read_rows(file: FileIO | BufferedRandom, first: int, into: Array) -> None:
    """Fill a contiguous array with a spilled file's rows from `first` on; raises OSError."""
    file.seek(first * into.strides[0])
    if file.readinto(into.data) != into.nbytes:
        raise OSError(f"{file.name}: a temporary file ends before row {first + len(into)}")


def _bytes(rows: Array) -> memoryview:
    return rows.reshape(-1).view(np.uint8).data


def _write_all(descriptor: int, part: memoryview) -> None:
    while part:
        part = part[os.write(descriptor, part) :]
