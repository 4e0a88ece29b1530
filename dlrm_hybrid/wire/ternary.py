"""A tensor as -1, 0 or 1 times a scale in 2 bits an element or less; the mean of several as levels.

    TERNARY   scale, f32 │ codes of 2 bits, four to a byte
    TRITS     scale, f32 │ codes as digits of base 3, five to a byte
    LEVELS    unit, f32 │ n, u32 │ levels from -n to n, plus n, in ceil(log2(2 n + 1)) bits each

A code is the sign plus one. Of M bytes of TERNARY byte j holds the elements 4 j to 4 j + 3 from the
lowest bits on, of TRITS j, j + M, … j + 4 M from the lowest digit on; what is left over are codes
for zero. Levels fill bytes from the lowest bits on (`kernels.ternary`). Any payload gives elements
or a `SectionError`.

A reader of LEVELS gets the mean bit for bit, and can apply it as the server did (W. Wen et al.,
TernGrad, NIPS 2017, parameter localisation).

Shapes: N elements.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from dlrm_hybrid.arrays import Bytes, Float32s
from dlrm_hybrid.kernels.ternary import SPARE_BYTES, read_bits, read_levels, write_levels
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

SCALE_BYTES = 4
MAX_TRAINERS = 4096
"""So many floats of 12 significant bits, each the same or its negative or 0, add up exactly."""

_LEVELS_HEAD_BYTES = 8
_QUADS, _TRITS = 4, 5  # codes to a byte
_DIGITS = 3**_TRITS
_ZEROS = 0x55  # codes for zero in a byte of TERNARY


def ternary(tensor: int, codes_N: Bytes, encoding: Encoding, scale: float) -> Section:
    """A section of codes."""
    codes_per_byte = _codes_per_byte(encoding)
    num_bytes = -(-codes_N.size // codes_per_byte)
    filled = np.ones(num_bytes * codes_per_byte, np.uint8)
    filled[: codes_N.size] = codes_N
    payload = np.empty(SCALE_BYTES + num_bytes, np.uint8)
    payload[:SCALE_BYTES].view(np.float32)[0] = scale
    packed = payload[SCALE_BYTES:]
    if encoding is Encoding.TERNARY:
        words = filled.view(np.uint32)
        pairs = words | words >> np.uint32(6)
        packed[:] = pairs | pairs >> np.uint32(12)
    else:
        packed[:] = 0
        for digits in reversed(filled.reshape(_TRITS, -1)):
            np.multiply(packed, 3, out=packed)
            np.add(packed, digits, out=packed)
    return Section(tensor, encoding, Dtype.FLOAT32, codes_N.size, payload.data)


def ternary_of(section: Section) -> Float32s:
    """The elements of a section that `ternary` made, in memory of their own.

    Raises:
        SectionError: no such section has this payload.
    """
    scale, count = scale_of(section), section.count
    packed = np.frombuffer(section.payload, np.uint8)[SCALE_BYTES:]
    if section.encoding is Encoding.TERNARY:
        values = np.empty(_QUADS * packed.size, np.float32)
        filling = packed[-1:] >> 2 * (count % _QUADS) if count % _QUADS else packed[:0]
        # A copy is writable: one type for the kernel.
        is_valid = read_bits(packed.copy(), scale, values)
        is_valid &= bool((filling == _ZEROS >> 2 * (count % _QUADS)).all())
    else:
        signs = _signs_of_trits()
        values = np.take(signs * np.float32(scale), packed, axis=1).reshape(-1)
        digits, indices = np.divmod(np.arange(count, values.size), max(packed.size, 1))
        is_valid = bool((packed < _DIGITS).all() and not signs[digits, packed[indices]].any())
    if not is_valid:
        raise section.error(f"its codes are not those of {count} elements")
    return values[:count]


def scale_of(section: Section) -> float:
    """The scale of a section that `ternary` made, whose codes may be broken.

    Raises:
        SectionError: no such section has a payload of this size or with this scale.
    """
    if not is_ternary(section) or section.dtype is not Dtype.FLOAT32:
        raise section.error(f"it holds {section.encoding.name} {section.dtype.name.lower()}")
    packed_bytes = -(-section.count // _codes_per_byte(section.encoding))
    if len(section.payload) != SCALE_BYTES + packed_bytes:
        raise section.error(f"{len(section.payload)} bytes for {section.count} elements")
    scale = float(np.frombuffer(section.payload, np.float32, 1)[0])
    if not (math.isfinite(scale) and scale >= 0):
        raise section.error(f"its scale is {scale}")
    return scale


def is_ternary(section: Section) -> bool:
    """Whether `ternary` makes such sections."""
    return section.encoding in (Encoding.TERNARY, Encoding.TRITS)


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
    num_bytes = _LEVELS_HEAD_BYTES + (mean_N.size * bits + 7) // 8
    payload = np.empty(num_bytes + SPARE_BYTES, np.uint8)
    payload[:4].view(np.float32)[0] = unit
    payload[4:_LEVELS_HEAD_BYTES].view(np.uint32)[0] = trainers
    if not write_levels(mean_N, unit, trainers, bits, payload[_LEVELS_HEAD_BYTES:]):
        raise ValueError(f"tensor {tensor}: no mean of {trainers} values of -{unit}, 0 or {unit}")
    return Section(tensor, Encoding.LEVELS, Dtype.FLOAT32, mean_N.size, payload[:num_bytes].data)


def mean_of(section: Section) -> Float32s:
    """The mean of a section that `levels` made, in memory of its own.

    Raises:
        SectionError: no such section has this payload.
    """
    if section.encoding is not Encoding.LEVELS or section.dtype is not Dtype.FLOAT32:
        raise section.error(f"it holds {section.encoding.name} {section.dtype.name.lower()}")
    data = np.frombuffer(section.payload, np.uint8)
    if data.size < _LEVELS_HEAD_BYTES:
        raise section.error(f"{data.size} bytes are no head")
    unit = float(data[:4].view(np.float32)[0])
    trainers = int.from_bytes(data[4:_LEVELS_HEAD_BYTES].tobytes(), "little")
    if not (math.isfinite(unit) and unit >= 0 and 1 <= trainers <= MAX_TRAINERS):
        raise section.error(f"a unit of {unit} for {trainers} trainers")
    bits = _bits(trainers)
    if data.size != _LEVELS_HEAD_BYTES + (section.count * bits + 7) // 8:
        raise section.error(f"{data.size} bytes for {section.count} levels of {bits} bits")
    fields = np.zeros(data.size - _LEVELS_HEAD_BYTES + SPARE_BYTES, np.uint8)
    fields[:-SPARE_BYTES] = data[_LEVELS_HEAD_BYTES:]
    mean_N = np.empty(section.count, np.float32)
    if not read_levels(fields, unit, trainers, bits, mean_N):
        raise section.error(f"a level is above {trainers}, or not finite")
    return mean_N


def _codes_per_byte(encoding: Encoding) -> int:
    return _QUADS if encoding is Encoding.TERNARY else _TRITS


@cache
def _signs_of_trits() -> Float32s:
    """The sign of every digit of every byte: -1, 0 or 1."""
    digits = np.arange(256) // 3 ** np.arange(_TRITS)[:, np.newaxis] % 3
    return (digits - 1).astype(np.float32)


def _bits(trainers: int) -> int:
    """The bits of a field: ceil(log2(2 n + 1))."""
    return (2 * trainers).bit_length()
