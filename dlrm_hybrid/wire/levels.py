"""The mean of n trainers' ternary values as a section: whole levels in ceil(log2(2 n + 1)) bits.

    LEVELS   unit, f32 │ n, u32 │ fields (`kernels.levels`)

Who reads it gets the mean bit for bit, and can learn from it as the server did (W. Wen et al.,
TernGrad, NIPS 2017, parameter localisation). Shapes: N elements.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.levels import SPARE_BYTES, read_levels, write_levels
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError

Float32s = NDArray[np.float32]

HEAD_BYTES = 8
MAX_TRAINERS = 4096
"""So many floats of 12 significant bits, each the same or its negative or 0, add up exactly."""


def levels(tensor: int, mean_N: Float32s, unit: float, trainers: int) -> Section:
    """A section of a mean.

    Args:
        tensor: number of the tensor.
        mean_N: float32, contiguous: of values that are -unit, 0 or unit.
        unit: float32 of 12 significant bits.
        trainers: n, at most MAX_TRAINERS.

    Raises:
        ValueError: a value is no such mean.
    """
    bits = _bits(trainers)
    num_bytes = HEAD_BYTES + (mean_N.size * bits + 7) // 8
    payload = np.empty(num_bytes + SPARE_BYTES, np.uint8)
    payload[:4].view(np.float32)[0] = unit
    payload[4:HEAD_BYTES].view(np.uint32)[0] = trainers
    if not write_levels(mean_N, unit, trainers, bits, payload[HEAD_BYTES:]):
        raise ValueError(f"tensor {tensor}: no mean of {trainers} values of -{unit}, 0 or {unit}")
    return Section(tensor, Encoding.LEVELS, Dtype.FLOAT32, mean_N.size, payload[:num_bytes].data)


def mean_of(section: Section) -> Float32s:
    """The mean of a section that `levels` made, in memory of its own.

    Raises:
        SectionError: no such section has this payload.
    """
    if section.encoding is not Encoding.LEVELS or section.dtype is not Dtype.FLOAT32:
        raise _error(section, f"it holds {section.encoding.name} {section.dtype.name.lower()}")
    given = np.frombuffer(section.payload, np.uint8)
    if given.size < HEAD_BYTES:
        raise _error(section, f"{given.size} bytes are no head")
    unit = float(given[:4].view(np.float32)[0])
    trainers = int.from_bytes(given[4:HEAD_BYTES].tobytes(), "little")
    if not (math.isfinite(unit) and unit >= 0 and 1 <= trainers <= MAX_TRAINERS):
        raise _error(section, f"a unit of {unit} for {trainers} trainers")
    bits = _bits(trainers)
    if given.size != HEAD_BYTES + (section.count * bits + 7) // 8:
        raise _error(section, f"{given.size} bytes for {section.count} levels of {bits} bits")
    fields = np.zeros(given.size - HEAD_BYTES + SPARE_BYTES, np.uint8)
    fields[:-SPARE_BYTES] = given[HEAD_BYTES:]
    mean_N = np.empty(section.count, np.float32)
    if not read_levels(fields, unit, trainers, bits, mean_N):
        raise _error(section, f"a level is above {trainers}, or not finite")
    return mean_N


def _bits(trainers: int) -> int:
    """Of a field: ceil(log2(2 n + 1))."""
    return (2 * trainers).bit_length()


def _error(section: Section, reason: str) -> SectionError:
    return SectionError(section.tensor, section.encoding, reason)
