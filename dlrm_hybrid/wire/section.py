"""One tensor of a frame: which it is, how its elements are encoded, and their bytes."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import NamedTuple

from dlrm_hybrid.types import DlrmError


class Encoding(IntEnum):
    """How the elements of a section lie in its payload.

    `wire.dense` reads DENSE, `wire.ternary` TERNARY, TRITS and LEVELS, `wire.gradient_levels`
    CODED, of all tensors of a bucket, `wire.sparse` all others.
    """

    DENSE = 1
    INDEX32 = 2
    BITMAP = 3
    RICE = 4
    ROWS = 5
    TERNARY = 6
    TRITS = 7
    LEVELS = 8
    CODED = 9


class Dtype(IntEnum):
    """Type of the elements of a section."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    INT32 = 4
    INT64 = 5
    UINT8 = 6
    FLOAT64 = 7


ELEMENT_BYTES = {
    Dtype.FLOAT32: 4,
    Dtype.BFLOAT16: 2,
    Dtype.FLOAT16: 2,
    Dtype.INT32: 4,
    Dtype.INT64: 8,
    Dtype.UINT8: 1,
    Dtype.FLOAT64: 8,
}
FLOATS = frozenset((Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16))
ENCODINGS = {int(encoding): encoding for encoding in Encoding}
DTYPES = {int(dtype): dtype for dtype in Dtype}


MAX_COUNT = 2**31 - 1
"""The most elements of a tensor: int32 counts them."""

ALIGNMENT = 8
"""Bytes to a multiple of which payloads are aligned: an array can be laid over one."""

HEAD_BYTES = 16
"""Size of a section's head."""

_CODED_BYTES, _TABLES_BYTES = 20, 2048  # of an element at most, and of tables


class SectionError(DlrmError):
    """A section whose payload is not what its head says.

    Attributes:
        tensor: number of the tensor.
        reason: what is wrong.
    """

    def __init__(self, tensor: int, encoding: Encoding, reason: str) -> None:
        super().__init__(f"tensor {tensor}: no {encoding.name} section: {reason}")
        self.tensor = tensor
        self.reason = reason


class Section(NamedTuple):
    """One tensor of a frame.

    Attributes:
        tensor: its number, position of its name in `ModelSpec.dense_shapes()`.
        encoding: how the payload is to be read.
        dtype: of the elements.
        count: elements of the tensor, whether they are in the payload or not.
        payload: the encoded elements; a memoryview has one-byte items.
    """

    tensor: int
    encoding: Encoding
    dtype: Dtype
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    payload: bytes | memoryview

    def error(self, reason: str) -> SectionError:
        """The error for a payload that is not what the head says."""
        return SectionError(self.tensor, self.encoding, reason)


@contextmanager
def blamed(label: str) -> Generator[None, None, None]:
    """Name what holds the sections that are read within the context, where one is faulty."""
    try:
        yield
    except SectionError as error:
        raise DlrmError(f"{label}: {error}") from error


def size_fault(encoding: Encoding, dtype: Dtype, count: int, num_bytes: int) -> str | None:
    """What is wrong with the size of a payload, found without reading it; None if nothing is.

    A dense payload has one size. Of the others this bounds only what a receiver may be made to
    hold: every element and a bitmap.
    """
    dense_bytes = count * ELEMENT_BYTES[dtype]
    if encoding is Encoding.DENSE:
        if num_bytes == dense_bytes:
            return None
        return f"{count} elements of {dtype.name.lower()} do not fill {num_bytes} bytes"
    if dtype not in FLOATS:
        return f"{encoding.name} holds floats, not {dtype.name.lower()}"
    if encoding is Encoding.CODED:
        dense_bytes = _CODED_BYTES * count + _TABLES_BYTES
    if num_bytes > dense_bytes + count // 8 + 8:
        return f"{num_bytes} bytes are more than {encoding.name} takes for {count} elements"
    return None


def payloads_of(sections: Iterable[Section]) -> list[bytes | memoryview]:
    """Payloads one behind the other, each filled up with zeros to a multiple of 8 bytes."""
    parts: list[bytes | memoryview] = []
    for section in sections:
        parts.append(section.payload)
        if padding := -len(section.payload) % ALIGNMENT:
            parts.append(bytes(padding))
    return parts


def read_sections(
    view: memoryview,
    begin: int,
    heads: Sequence[tuple[int, int, int, int, int]],
    types: int,
    error: Callable[[int, str], DlrmError],
) -> tuple[Section, ...]:
    """Sections whose heads and payloads end where the bytes do; payloads view them.

    Args:
        view: the bytes.
        begin: where the heads begin.
        heads: tensor, encoding, dtype, count and payload bytes of each.
        types: where encoding and dtype lie in a head.
        error: made of the byte at which a fault shows, and the fault.
    """
    at, end = begin + HEAD_BYTES * len(heads), len(view)
    sections: list[Section] = []
    offset = begin
    for tensor, encoding, dtype, count, num_bytes in heads:
        if encoding not in ENCODINGS:
            raise error(offset + types, f"encoding {encoding} is unknown")
        if dtype not in DTYPES:
            raise error(offset + types + 1, f"element type {dtype} is unknown")
        if fault := size_fault(ENCODINGS[encoding], DTYPES[dtype], count, num_bytes):
            raise error(offset + 4, fault)
        if num_bytes > end - at:
            raise error(offset + 8, f"a payload of {num_bytes} bytes does not fit")
        payload = view[at : at + num_bytes]
        sections.append(Section(tensor, ENCODINGS[encoding], DTYPES[dtype], count, payload))
        at += num_bytes + -num_bytes % ALIGNMENT
        offset += HEAD_BYTES
    if at != end:
        raise error(min(at, end), f"{abs(end - at)} bytes too many or too few")
    return tuple(sections)
