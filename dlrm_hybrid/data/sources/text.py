"""Reads text files, plain or compressed, in blocks of whole lines.

Files of other kinds are recognised by their first bytes and refused with advice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader, RawIOBase
from pathlib import Path
from typing import Any, cast

import numpy as np
import xxhash
from isal import igzip, isal_zlib

from dlrm_hybrid.arrays import Bytes
from dlrm_hybrid.kernels.criteo import count_lines
from dlrm_hybrid.types import DataError

_COMPRESS = "decompress it, or compress it by gzip or zstd instead"
_UNPACK = "unpack it first"
_CONVERT = "write it as Parquet or CSV"
_AS_IT_IS = "data=table reads it where it is not compressed as a whole"
# Required after a magic word that a header of CSV might begin with as well.
_BINARY = rb"(?s:.{0,200}?)[\x00-\x08\x0e-\x1f]"


# Kinds of files that are not read: by a pattern of the first bytes the name, and what the user can
# do. The first match counts, so kinds of archives stand before archives in general.
_FORMATS: Mapping[bytes, tuple[str, str]] = {
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": ("compressed by bzip2", _COMPRESS),
    rb"\xfd7zXZ\0": ("compressed by xz", _COMPRESS),
    rb"\x5d\0\0": ("compressed by lzma", _COMPRESS),
    rb"\x04\x22\x4d\x18": ("compressed by lz4", _COMPRESS),
    rb"\xff\x06\0\0sNaPpY": ("compressed by snappy", _COMPRESS),
    rb"\x1f\x9d": ("compressed by compress", _COMPRESS),
    rb"LZIP\x01": ("compressed by lzip", _COMPRESS),
    rb"\x1f\x8b|\x28\xb5\x2f\xfd": ("compressed twice", "decompress it once"),
    rb"PK\x03\x04(?s:.{0,4000}?)(\[Content_Types\]\.xml|xl/)": (
        "a workbook of Excel",
        "save its sheet as CSV",
    ),
    rb"PK\x03\x04(?s:.{26})[^\0]{1,200}?\.npy": (
        "an archive of arrays (.npz)",
        "save one structured array with numpy.save",
    ),
    rb"PK(\x03\x04|\x05\x06)": ("a zip archive", _UNPACK),
    rb"7z\xbc\xaf\x27\x1c": ("a 7z archive", _UNPACK),
    rb"Rar!\x1a\x07": ("a rar archive", _UNPACK),
    rb"(?s:.{257})ustar": ("a tar archive", _UNPACK),
    rb"PAR1": ("a Parquet file", _AS_IT_IS),
    rb"PARE" + _BINARY: ("an encrypted Parquet file", _CONVERT),
    rb"\x93NUMPY": ("a .npy file", _AS_IT_IS),
    rb"ORC" + _BINARY: ("an ORC file", f"{_CONVERT} (pandas.read_orc)"),
    rb"Obj\x01": ("an Avro file", _CONVERT),
    rb"ARROW1\0\0|FEA1": ("an Arrow (Feather) file", f"{_CONVERT} (pandas.read_feather)"),
    rb"\xff\xff\xff\xff(?s:.{3})\0": ("a stream of Arrow", f"{_CONVERT} (pyarrow.ipc)"),
    rb"\x89HDF\r\n\x1a\n": ("an HDF5 file", f"{_CONVERT} (pandas.read_hdf)"),
    rb"SQLite format 3\0": ("an SQLite database", f"{_CONVERT} (pandas.read_sql)"),
    rb"\xd0\xcf\x11\xe0": ("a file of an old Office", "save its sheet as CSV"),
    rb"\x80[\x02-\x05]": ("a pickle", _CONVERT),
    rb"%PDF-": ("a PDF", _CONVERT),
    rb"\s*(?i:<!doctype|<html)": ("a page of HTML", "see whether a server sent it for the file"),
    rb"(\xef\xbb\xbf)?\s*<\?xml": ("XML", _CONVERT),
    rb"\xff\xfe\0\0|\0\0\xfe\xff": ("text in UTF-32", "save it in UTF-8"),
    rb"\xff\xfe|\xfe\xff": ("text in UTF-16", "save it in UTF-8"),
    rb"(\xef\xbb\xbf)?\s*(\[\s*[\[{]|\{\s*[\"}])": ("JSON", f"{_CONVERT} (pandas.read_json)"),
    rb"[-+.\d]+( (qid|\d+(:\d+)?):[-+.\deE]+)+[ \t\r]*\n": (
        "no table with a header but LibSVM or LibFFM",
        f"{_CONVERT} with a column for each feature",
    ),
}


def refuse_others(chunks: Iterator[bytes], path: Path, key: str) -> Iterator[bytes]:
    """Pass decompressed text through; DataError if its first piece is of a kind in `_FORMATS`."""
    head = next(chunks, b"")
    for pattern, (name, hint) in _FORMATS.items():
        if re.match(pattern, head):
            raise DataError(f"{path}: is {name}, which is not read here: {hint} ({key})")
    if head:
        yield head
    yield from chunks


MAX_LINE_BYTES = 1 << 20
RAW_KEY = "data.raw"
_CHUNK_BYTES = 1 << 17
_SAMPLE_BYTES, _SAMPLE_PIECE_BYTES = 1 << 20, 1 << 12
_MAGIC = {
    ".gz": re.compile(rb"\x1f\x8b"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18"),  # a frame, or skippable one
}
# The zstd command's limit without --long, and Arrow's: a decoder keeps this much text in memory.
_ZSTD_MAX_WINDOW_BYTES = 1 << 27
_DAMAGED = (OSError, EOFError, cast(type[Exception], isal_zlib.error))
_TOO_MUCH_MEMORY, _TRUNCATED = "too much memory", "Truncated"  # in messages of libzstd and Arrow


@dataclass(frozen=True, slots=True)
class Lines:
    """Consecutive lines of one file.

    Attributes:
        file: index of the file.
        first_line: number of the first line in its file, from 1.
        lines: number of lines, a last one without newline included.
        text: uint8; valid until the next block is asked for.
        raw_bytes: bytes of all files read so far, before decompression.
    """

    file: int
    first_line: int
    lines: int
    text: Bytes
    raw_bytes: int


class _Pieces(RawIOBase):
    """The bytes of a file, at most some at a time, each shown as it is read."""

    def __init__(self, file: BufferedReader, piece_bytes: int, seen: Callable[[bytes], object]):
        self._file, self._piece_bytes, self._seen = file, piece_bytes, seen

    def readable(self) -> bool:
        """They are: decoders ask."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, no more than `size`."""
        piece = self._file.read(min(size, self._piece_bytes))
        self._seen(piece)
        return piece

    def readinto(self, buffer: Any) -> int:
        """Fill the beginning of a buffer."""
        piece = self.read(len(buffer))
        buffer[: len(piece)] = piece
        return len(piece)


def _compression(file: BufferedReader, path: Path, key: str) -> str | None:
    """Compression by the first bytes: `.gz`, `.zst` or None for plain text."""
    head = file.peek(4)[:4]
    kind = next((suffix for suffix, magic in _MAGIC.items() if magic.match(head)), None)
    if path.suffix in _MAGIC and kind != path.suffix:
        raise DataError(f"{path}: not a {path.suffix} file, it begins with {head!r} ({key})")
    return kind


def _decompressed(kind: str | None, pieces: _Pieces) -> Any:
    """A file of the text; one or several members, of which gzip's may have zeros behind them."""
    if kind == ".gz":
        return igzip.IGzipFile(fileobj=pieces, mode="rb")
    if kind == ".zst":
        from dlrm_hybrid.data.sources.arrow import pa  # takes a while

        return pa.CompressedInputStream(pa.PythonFile(pieces, "r"), "zstd")
    return pieces


def _damage(error: Exception, file_bytes: int, text_bytes: int) -> str:
    if isinstance(error, EOFError) or _TRUNCATED in str(error):
        return f"the compressed file is truncated after {file_bytes} bytes ({text_bytes} of text)"
    reason = str(error)
    if _TOO_MUCH_MEMORY in reason:
        reason = (
            f"its window is larger than {_ZSTD_MAX_WINDOW_BYTES} bytes; compress it again without "
            "zstd's --long"
        )
    place = f"near byte {file_bytes}, after {text_bytes} bytes of text"
    return f"damaged compressed data {place}: {reason}"


def read_text(
    file: BufferedReader,
    path: Path,
    chunk_bytes: int,
    seen: Callable[[bytes], object],
    key: str = RAW_KEY,
) -> Iterator[bytes]:
    """Yield the decompressed text of an open file in non-empty pieces.

    Args:
        file: the file at its beginning.
        chunk_bytes: bytes of the file read at a time.
        seen: called with each piece of the file before decompression.

    Raises:
        DataError: it cannot be read, is damaged or truncated, or is a file of another kind.
    """

    text_bytes = 0

    def chunks(stream: Any) -> Iterator[bytes]:
        nonlocal text_bytes
        while chunk := stream.read(chunk_bytes):
            text_bytes += len(chunk)
            yield chunk

    try:
        kind = _compression(file, path, key)
        text = chunks(_decompressed(kind, _Pieces(file, chunk_bytes, seen)))
        yield from refuse_others(text, path, key)
    except _DAMAGED as error:
        is_disk = isinstance(error, OSError) and error.errno is not None
        fault = f"cannot be read: {error}" if is_disk else _damage(error, file.tell(), text_bytes)
        raise DataError(f"{path}: {fault} ({key})") from error


def long_line(path: Path, line: int) -> DataError:
    """The error for a line that would need too large a buffer; never skipped as a bad row."""
    return DataError(f"{path}:{line}: line longer than {MAX_LINE_BYTES} bytes: not Criteo rows")


def estimated_rows(path: Path) -> float:
    """Estimate the number of rows of a raw file from its first MiB of text."""
    text_bytes = lines = 0
    with path.open("rb") as file:
        # `blocks` reports damage: bad rows before it must be reported first.
        with suppress(DataError):
            for chunk in read_text(file, path, _SAMPLE_PIECE_BYTES, len):
                text_bytes += len(chunk)
                lines += chunk.count(b"\n")
                if text_bytes >= _SAMPLE_BYTES:
                    break
        return path.stat().st_size * lines / max(1, file.tell())


def blocks(
    paths: Sequence[Path],
    block_bytes: int,
    digests: Sequence[xxhash.xxh3_128],
    key: str = RAW_KEY,
) -> Iterator[Lines]:
    """Yield all lines of all files in order, in blocks of which none spans two files.

    Args:
        block_bytes: approximate bytes of text of a block.
        digests: for each file a digest, updated by its bytes before decompression.

    Raises:
        DataError: a file cannot be read or is damaged, or a line is longer than `MAX_LINE_BYTES`.
    """
    offset = 0
    for index, (path, digest) in enumerate(zip(paths, digests, strict=True)):
        with path.open("rb") as file:
            chunks = read_text(file, path, min(_CHUNK_BYTES, block_bytes), digest.update, key)
            for first_line, lines, text in _lines(chunks, path, block_bytes):
                yield Lines(index, first_line, lines, text, offset + file.tell())
            offset += file.tell()


def _lines(
    chunks: Iterator[bytes], path: Path, block_bytes: int
) -> Iterator[tuple[int, int, Bytes]]:
    """Yield the blocks of one file: number of the first line, number of lines, text."""
    text = bytearray()
    first_line = 1
    for chunk in chunks:
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
