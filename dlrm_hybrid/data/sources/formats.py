"""Files that are no text of rows, known by their first bytes: what they are, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dlrm_hybrid.types import DataError

_COMPRESS = "decompress it, or compress it by gzip or zstd instead"
_UNPACK = "unpack it first"
_CONVERT = "write it as Parquet or CSV"
_AS_IT_IS = "data=table reads it where it is not compressed as a whole"
# After a short name that a header of CSV might begin with as well.
_BINARY = rb"(?s:.{0,200}?)[\x00-\x08\x0e-\x1f]"


class _Format(NamedTuple):
    """A kind of file.

    Attributes:
        head: what it begins with.
        what: it is.
        advice: what to do with it.
    """

    head: re.Pattern[bytes]
    what: str
    advice: str


def _format(head: bytes, what: str, advice: str) -> _Format:
    return _Format(re.compile(head), what, advice)


# The first that fits: archives of a kind stand before those of any kind.
_FORMATS: Sequence[_Format] = (
    _format(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)", "compressed by bzip2", _COMPRESS),
    _format(rb"\xfd7zXZ\0", "compressed by xz", _COMPRESS),
    _format(rb"\x5d\0\0", "compressed by lzma", _COMPRESS),
    _format(rb"\x04\x22\x4d\x18", "compressed by lz4", _COMPRESS),
    _format(rb"\xff\x06\0\0sNaPpY", "compressed by snappy", _COMPRESS),
    _format(rb"\x1f\x9d", "compressed by compress", _COMPRESS),
    _format(rb"LZIP\x01", "compressed by lzip", _COMPRESS),
    _format(rb"\x1f\x8b|\x28\xb5\x2f\xfd", "compressed twice", "decompress it once"),
    _format(
        rb"PK\x03\x04(?s:.{0,4000}?)(\[Content_Types\]\.xml|xl/)",
        "a workbook of Excel",
        "save its sheet as CSV",
    ),
    _format(
        rb"PK\x03\x04(?s:.{26})[^\0]{1,200}?\.npy",
        "an archive of arrays (.npz)",
        "save one structured array with numpy.save",
    ),
    _format(rb"PK(\x03\x04|\x05\x06)", "a zip archive", _UNPACK),
    _format(rb"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    _format(rb"Rar!\x1a\x07", "a rar archive", _UNPACK),
    _format(rb"(?s:.{257})ustar", "a tar archive", _UNPACK),
    _format(rb"PAR1", "a Parquet file", _AS_IT_IS),
    _format(rb"PARE" + _BINARY, "an encrypted Parquet file", _CONVERT),
    _format(rb"\x93NUMPY", "a .npy file", _AS_IT_IS),
    _format(rb"ORC" + _BINARY, "an ORC file", f"{_CONVERT} (pandas.read_orc)"),
    _format(rb"Obj\x01", "an Avro file", _CONVERT),
    _format(rb"ARROW1\0\0|FEA1", "an Arrow (Feather) file", f"{_CONVERT} (pandas.read_feather)"),
    _format(rb"\xff\xff\xff\xff(?s:.{3})\0", "a stream of Arrow", f"{_CONVERT} (pyarrow.ipc)"),
    _format(rb"\x89HDF\r\n\x1a\n", "an HDF5 file", f"{_CONVERT} (pandas.read_hdf)"),
    _format(rb"SQLite format 3\0", "an SQLite database", f"{_CONVERT} (pandas.read_sql)"),
    _format(rb"\xd0\xcf\x11\xe0", "a file of an old Office", "save its sheet as CSV"),
    _format(rb"\x80[\x02-\x05]", "a pickle", _CONVERT),
    _format(rb"%PDF-", "a PDF", _CONVERT),
    _format(
        rb"\s*(?i:<!doctype|<html)", "a page of HTML", "see whether a server sent it for the file"
    ),
    _format(rb"(\xef\xbb\xbf)?\s*<\?xml", "XML", _CONVERT),
    _format(rb"\xff\xfe\0\0|\0\0\xfe\xff", "text in UTF-32", "save it in UTF-8"),
    _format(rb"\xff\xfe|\xfe\xff", "text in UTF-16", "save it in UTF-8"),
    _format(
        rb"(\xef\xbb\xbf)?\s*(\[\s*[\[{]|\{\s*[\"}])", "JSON", f"{_CONVERT} (pandas.read_json)"
    ),
    _format(
        rb"[-+.\d]+( (qid|\d+(:\d+)?):[-+.\deE]+)+[ \t\r]*\n",
        "no table with a header but LibSVM or LibFFM",
        f"{_CONVERT} with a column for each feature",
    ),
)


def refuse_others(chunks: Iterator[bytes], path: Path, key: str) -> Iterator[bytes]:
    """Pieces of decompressed text as they are.

    Args:
        chunks: the pieces, of which the first is looked at.
        path: of the file, for messages.
        key: of the configuration that names the file.

    Raises:
        DataError: they are no text of rows, but one of the kinds of files that are known here.
    """
    head = next(chunks, b"")
    for one in _FORMATS:
        if one.head.match(head):
            raise DataError(f"{path}: is {one.what}, which is not read here: {one.advice} ({key})")
    if head:
        yield head
    yield from chunks
