"""Files that are on the disk when a function returns; free of torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

CHUNK_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Content:
    """What a file holds.

    Attributes:
        num_bytes: its size.
        xxh3: checksum (XXH3, 128 bits) in hexadecimal digits.
    """

    num_bytes: int
    xxh3: str


def write(path: Path, parts: Iterable[memoryview]) -> Content:
    """Make a file of these bytes; other threads run meanwhile.

    The checksum is of the bytes in memory: what the disk makes of them is found out by reading.

    Raises:
        OSError: it cannot be written.
    """
    digest = xxhash.xxh3_128()
    num_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        for part in parts:
            for begin in range(0, len(part), CHUNK_BYTES):
                chunk = part[begin : begin + CHUNK_BYTES]
                digest.update(chunk)
                _write_all(descriptor, chunk)
            num_bytes += len(part)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return Content(num_bytes, digest.hexdigest())


def content(path: Path, progress: Callable[[int], object] = lambda done: None) -> Content:
    """What a file holds.

    Args:
        path: of the file.
        progress: called with the bytes that have been read.

    Raises:
        OSError: it cannot be read.
    """
    digest = xxhash.xxh3_128()
    num_bytes = 0
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            num_bytes += len(chunk)
            progress(num_bytes)
    return Content(num_bytes, digest.hexdigest())


def replace_text(path: Path, text: str) -> None:
    """A file that is there with all of the text, or as it was before; raises OSError."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        write(partial, [memoryview(text.encode())])
        partial.replace(path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, chunk: memoryview) -> None:
    while chunk:
        chunk = chunk[os.write(descriptor, chunk) :]
