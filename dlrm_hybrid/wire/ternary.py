"""A whole tensor as -1, 0 or 1 times a scale: 2 bits an element, or five elements to a byte.

    TERNARY   scale, f32 │ codes of 2 bits, four to a byte
    TRITS     scale, f32 │ digits of base 3, five to a byte

`kernels.ternary` says how codes lie and how they are drawn. Any payload gives elements or a
`SectionError`. Shapes: N elements.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.ternary import (
    TRITS,
    read_bits,
    read_trits,
    ternarise_bits,
    ternarise_trits,
)
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError

Float32s = NDArray[np.float32]

SCALE_BYTES = 4


def ternary(
    tensor: int, values_N: Float32s, encoding: Encoding, *, limit: float, scale: float, key: int
) -> Section:
    """A section of codes whose mean over all keys is the value, clipped.

    Args:
        tensor: number of the tensor.
        values_N: float32, contiguous, finite.
        encoding: TERNARY or TRITS.
        limit: magnitude at which values are clipped.
        scale: float32, at least every clipped magnitude.
        key: of the draws, 63 bits; the same key draws the same codes in either encoding.
    """
    payload = np.empty(SCALE_BYTES + _packed_bytes(encoding, values_N.size), np.uint8)
    payload[:SCALE_BYTES].view(np.float32)[0] = scale
    write = ternarise_bits if encoding is Encoding.TERNARY else ternarise_trits
    write(values_N, limit, scale, key, payload[SCALE_BYTES:])
    return Section(tensor, encoding, Dtype.FLOAT32, values_N.size, payload.data)


def ternary_of(section: Section) -> Float32s:
    """The elements of a section that `ternary` made, in memory of their own.

    Raises:
        SectionError: no such section has this payload.
    """
    scale = scale_of(section)
    given = np.frombuffer(section.payload, np.uint8)[SCALE_BYTES:].copy()
    values_N = np.empty(section.count, np.float32)
    read = read_bits if section.encoding is Encoding.TERNARY else read_trits
    if not read(given, scale, values_N):
        raise _error(section, f"its codes are not those of {section.count} elements")
    return values_N


def scale_of(section: Section) -> float:
    """The scale of a section that `ternary` made, whose codes may be broken.

    Raises:
        SectionError: no such section has a payload of this size or with this scale.
    """
    if not is_ternary(section) or section.dtype is not Dtype.FLOAT32:
        raise _error(section, f"it holds {section.encoding.name} {section.dtype.name.lower()}")
    if len(section.payload) != SCALE_BYTES + _packed_bytes(section.encoding, section.count):
        raise _error(section, f"{len(section.payload)} bytes for {section.count} elements")
    scale = float(np.frombuffer(section.payload, np.float32, 1)[0])
    if not (math.isfinite(scale) and scale >= 0):
        raise _error(section, f"its scale is {scale}")
    return scale


def is_ternary(section: Section) -> bool:
    """Whether `ternary` makes such sections."""
    return section.encoding in (Encoding.TERNARY, Encoding.TRITS)


def _packed_bytes(encoding: Encoding, count: int) -> int:
    return -(-count // (4 if encoding is Encoding.TERNARY else TRITS))


def _error(section: Section, reason: str) -> SectionError:
    return SectionError(section.tensor, section.encoding, reason)
