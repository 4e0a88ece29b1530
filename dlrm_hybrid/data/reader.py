"""Raw files, plain or compressed, as blocks of whole lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import numpy as np
import numpy.typing as npt
import xxhash
import zstandard
from isal import isal_zlib

from dlrm_hybrid.data.manifest import SourceFile
from dlrm_hybrid.kernels.parse import count_lines
from dlrm_hybrid.types import DataError

MAX_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 17
_EDGE_BYTES = 1 << 20
_SAMPLE_BYTES = 1 << 20
_MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame, a skippable one
}
_DAMAGED = (cast(type[Exception], isal_zlib.error), zstandard.ZstdError)
_GZIP_WINDOW_BITS = 31
_ZSTD_MAX_WINDOW_BYTES = 1 << 31


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive lines of one file.

    Attributes:
        file: index of the file.
        first_line: number of the first line in its file, from 1.
        lines: how many, a last one without newline included.
        text: uint8; valid until the next block is asked for.
        raw_bytes: bytes read of all files so far, as they lie on the disk.
    """

    file: int
    first_line: int
    lines: int
    text: npt.NDArray[np.uint8]
    raw_bytes: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The first MiB of text of a file: `lines` newlines in `raw_bytes` as they lie on the disk."""

    raw_bytes: int
    lines: int


class _Decoder(Protocol):
    """One compressed member; what zlib, isal and zstandard agree on."""

    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, /) -> bytes: ...


def _gzip_decoder() -> _Decoder:
    return isal_zlib.decompressobj(wbits=_GZIP_WINDOW_BITS)


def _zstd_decoder() -> _Decoder:
    return zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES).decompressobj()


_DECODERS: dict[str, Callable[[], _Decoder]] = {".gz": _gzip_decoder, ".zst": _zstd_decoder}


def _compression(file: BinaryIO, path: Path) -> str | None:
    """`.gz`, `.zst` or None for plain text, told by the first bytes."""
    head = file.read(4)
    file.seek(0)
    kind = next((suffix for suffix, magic in _MAGIC.items() if magic.match(head)), None)
    if path.suffix in _MAGIC and kind != path.suffix:
        raise DataError(f"{path}: not a {path.suffix} file, it begins with {head!r} (data.raw)")
    return kind


def _decompress(
    file: BinaryIO, path: Path, chunk_bytes: int, new_decoder: Callable[[], _Decoder]
) -> Iterator[bytes]:
    """Text of one or several members; zero bytes between and behind gzip members are padding."""
    decoder: _Decoder | None = None
    data = b""
    text_bytes = 0
    while data or (data := file.read(chunk_bytes)):
        if decoder is None:
            data = data.lstrip(b"\0")
            if not data:
                continue
            decoder = new_decoder()
        try:
            text = decoder.decompress(data)
        except _DAMAGED as error:
            raise DataError(
                f"{path}: damaged compressed data near byte {file.tell()}, "
                f"after {text_bytes} bytes of text: {error}"
            ) from error
        data = b""
        if decoder.eof:
            data = decoder.unused_data
            decoder = None
        text_bytes += len(text)
        yield text
    if decoder is not None:
        raise DataError(
            f"{path}: the compressed file is cut: it ends after {file.tell()} bytes, "
            f"{text_bytes} bytes of text, without its end mark"
        )


def _chunks(file: BinaryIO, path: Path, chunk_bytes: int) -> Iterator[bytes]:
    """The text of an open file in pieces, reading `chunk_bytes` at a time.

    Raises:
        DataError: it cannot be read, is damaged, or ends before its compressed stream does.
    """
    try:
        kind = _compression(file, path)
        if kind is not None:
            yield from _decompress(file, path, chunk_bytes, _DECODERS[kind])
        else:
            while chunk := file.read(chunk_bytes):
                yield chunk
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} (data.raw)") from error


def long_line(path: Path, line: int) -> DataError:
    """The error for a line that no buffer should grow for; never skipped as a bad row."""
    return DataError(f"{path}:{line}: line longer than {MAX_LINE_BYTES} bytes: not Criteo rows")


def describe(path: Path) -> SourceFile:
    """Name, size and a hash of the edges of a raw file.

    Raises:
        DataError: it is missing, not a regular file or cannot be read.
    """
    if not path.is_file():
        what = "not a regular file" if path.exists() else "no such file"
        raise DataError(f"{path}: {what} (data.raw)")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            digest = xxhash.xxh3_128(file.read(_EDGE_BYTES))
            file.seek(max(0, size - _EDGE_BYTES))
            digest.update(file.read(_EDGE_BYTES))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error} (data.raw)") from error
    return SourceFile(name=path.name, num_bytes=size, xxh3=digest.hexdigest())


def sample(path: Path) -> Sample:
    """Measure the head of a raw file, as far as it can be read, to estimate the rows of it all."""
    text_bytes = lines = 0
    with path.open("rb") as file:
        # Damage is for `blocks` to report: rows before it may be bad too, and those come first.
        with suppress(DataError):
            for chunk in _chunks(file, path, _CHUNK_BYTES):
                text_bytes += len(chunk)
                lines += chunk.count(b"\n")
                if text_bytes >= _SAMPLE_BYTES:
                    break
        return Sample(file.tell(), lines)


def blocks(paths: Sequence[Path], block_bytes: int) -> Iterator[Block]:
    """All lines of all files in order, in blocks of about `block_bytes`; none spans two files.

    Raises:
        DataError: a file cannot be read or is damaged, or a line is longer than `MAX_LINE_BYTES`.
    """
    done = 0
    for index, path in enumerate(paths):
        with path.open("rb") as file:
            for first_line, lines, text in _lines(file, path, block_bytes):
                yield Block(index, first_line, lines, text, done + file.tell())
            done += file.tell()


def _lines(
    file: BinaryIO, path: Path, block_bytes: int
) -> Iterator[tuple[int, int, npt.NDArray[np.uint8]]]:
    """Blocks of one file: number of the first line, lines, text."""
    text = bytearray()
    first_line = 1
    for chunk in _chunks(file, path, min(_CHUNK_BYTES, block_bytes)):
        text += chunk
        if len(text) < block_bytes:
            continue
        lines, end = count_lines(np.frombuffer(text, np.uint8))
        if lines:
            yield first_line, lines, np.frombuffer(text, np.uint8, count=end)
            first_line += lines
            text = text[end:]
        if len(text) > MAX_LINE_BYTES:
            raise long_line(path, first_line)
    if text:
        rest = np.frombuffer(text, np.uint8)
        lines, end = count_lines(rest)
        yield first_line, lines + (end < len(text)), rest
