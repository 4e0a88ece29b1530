"""Reads what `wire.sparse` writes: elements of several sections at once.

Any payload gives indices that rise from 0 to N - 1 and as many values, or a `SectionError`. No
memory is taken beyond ten bytes for every value that the payloads have room for, and the payloads.

Shapes: K elements of all sections, which lie between E places; T sections.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.read_sections import SIZE, read_sections
from dlrm_hybrid.wire.section import (
    ELEMENT_BYTES,
    FLOATS,
    Dtype,
    Encoding,
    Section,
    SectionError,
)
from dlrm_hybrid.wire.values import Float32s, unpack

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

MAX_COUNT = 2**31 - 1
FLOAT_BYTES = ELEMENT_BYTES[Dtype.FLOAT32]


class Parts(NamedTuple):
    """What several sections hold, in memory of their own.

    Attributes:
        bounds_E: int64, where the elements of each begin, and the end of the last.
        indices_K: int32, rising within each section.
        values_K: float32.
    """

    bounds_E: Int64s
    indices_K: Int32s
    values_K: Float32s


def read(sections: Sequence[Section], width: int) -> Parts:
    """The elements of sections of one type; `width` is that of their matrices, for ROWS, or 0.

    Raises:
        SectionError: no such section has the payload of one.
    """
    dtype = sections[0].dtype if sections else Dtype.FLOAT32
    for section in sections:
        _check(section, dtype, width)
    payloads = [section.payload for section in sections]
    joined = payloads[0] if len(payloads) == 1 else b"".join(payloads)
    # Read-only whatever the frame was: one type for the kernel.
    data = np.frombuffer(memoryview(joined).toreadonly(), np.uint8)
    value_bytes = ELEMENT_BYTES[dtype]
    heads = [(int(one.encoding), one.count, len(one.payload)) for one in sections]
    room = data.size // value_bytes
    bounds_E, indices_K = np.empty(len(sections) + 1, np.int64), np.empty(room, np.int32)
    # A bfloat16 is half of a float32: read into its place, no pass of its own.
    taken_bytes = value_bytes if dtype is Dtype.FLOAT16 else FLOAT_BYTES
    values = np.empty(room * taken_bytes, np.uint8)
    heads_T3 = np.array(heads, np.int64).reshape(-1, 3)
    fault = read_sections(
        data, heads_T3, width, value_bytes, taken_bytes, bounds_E, indices_K, values
    )
    if fault >= 0:
        raise _fault(sections[fault // 2], fault % 2)
    size = int(bounds_E[-1])
    values = values[: size * taken_bytes]
    values_K = unpack(values, dtype) if dtype is Dtype.FLOAT16 else values.view(np.float32)
    return Parts(bounds_E, indices_K[:size], values_K)


def _check(section: Section, dtype: Dtype, width: int) -> None:
    if section.dtype not in FLOATS or section.count > MAX_COUNT:
        raise misfit(section, f"it holds {section.count} elements of {section.dtype.name.lower()}")
    if section.dtype is not dtype:
        raise misfit(section, f"it holds {section.dtype.name.lower()}, others {dtype.name.lower()}")
    if section.encoding > Encoding.ROWS:
        raise misfit(section, "its elements are not listed")
    if section.encoding is Encoding.ROWS and not width:
        raise misfit(section, "only the shape of its matrix tells what it holds")


def _fault(section: Section, fault: int) -> SectionError:
    count = section.count
    if fault == SIZE:
        return misfit(section, f"{len(section.payload)} bytes hold no choice of {count} elements")
    match section.encoding:
        case Encoding.INDEX32:
            return misfit(section, f"indices do not rise from 0 to {count - 1}")
        case Encoding.BITMAP:
            return misfit(section, f"the bitmap does not choose as many of {count} as have values")
        case Encoding.ROWS:
            return misfit(section, "columns do not rise inside their rows")
        case _:
            return misfit(section, f"the gaps are not those of indices below {count}")


def misfit(section: Section, reason: str) -> SectionError:
    """What is wrong with the section."""
    return SectionError(section.tensor, section.encoding, reason)
