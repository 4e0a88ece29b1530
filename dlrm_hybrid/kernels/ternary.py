"""Values as -1, 0 or 1 times a scale, drawn so that the mean is the value; their means as levels.

A code is the sign plus one. Element i draws from the counter i and a key, so what is drawn depends
on nothing else: not on how codes are packed, not on what was drawn before. The key is scrambled
once; for every element a mixer of shifts and odd multipliers, as MurmurHash3 ends with, turns it
and the counter into 24 bits (W. Wen et al., TernGrad, NIPS 2017).

Shapes: N values, M bytes.
"""

from __future__ import annotations

import numpy as np

from dlrm_hybrid.arrays import Bytes, Float32s
from dlrm_hybrid.kernels.bits import GAMMA, LARGEST, load64, mix64, store64
from dlrm_hybrid.kernels.jit import kernel

SPARE_BYTES = 8  # behind levels, to read and to write 64 bits at a time

_ODD = np.uint32(0x9E3779B9)
_FIRST, _SECOND = np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97)
_SHIFT_16, _SHIFT_15, _SHIFT_8 = np.uint32(16), np.uint32(15), np.uint32(8)
_UNIT = np.float32(2.0**-24)
_WORD = np.uint64(0xFFFFFFFF)
_LOW = np.uint8(0x55)


@kernel
def ternarise(values_N: Float32s, limit: float, scale: float, key: int, codes_N: Bytes) -> None:
    """Draw a ternary code for every value, at random and unbiased.

    Args:
        values_N: finite.
        limit: magnitude at which values are clipped.
        scale: at least every clipped magnitude.
        key: of the draws, 63 bits.
        codes_N: receives 0, 1 or 2.
    """
    top, unit = np.float32(limit), np.float32(scale)
    word = mix64(np.uint64(key) + GAMMA)
    start, high = np.uint32(word & _WORD), np.uint32(word >> np.uint64(32))
    for i in range(values_N.size):
        mixed = np.uint32(np.uint32(np.uint32(i) * _ODD) + start)
        mixed = np.uint32(mixed ^ np.uint32(mixed >> _SHIFT_16))
        mixed = np.uint32(mixed * _FIRST)
        mixed = np.uint32(np.uint32(mixed ^ np.uint32(mixed >> _SHIFT_15)) ^ high)
        mixed = np.uint32(mixed * _SECOND)
        mixed = np.uint32(mixed ^ np.uint32(mixed >> _SHIFT_15))
        chance = np.float32(np.int32(np.uint32(mixed >> _SHIFT_8))) * _UNIT
        value = values_N[i]
        fires = chance * unit < min(abs(value), top)
        sign = np.int32(value > 0) - np.int32(value < 0)
        codes_N[i] = np.uint8(1 + (sign if fires else 0))


@kernel
def read_bits(packed_M: Bytes, scale: float, values: Float32s) -> bool:
    """The values, four of each byte, of codes in 2 bits each; False if a code is none."""
    unit = np.float32(scale)
    broken = np.uint8(0)
    for j in range(packed_M.size):
        byte = packed_M[j]
        broken |= byte & (byte >> np.uint8(1)) & _LOW
        for place in range(4):
            code = np.int32((byte >> np.uint8(2 * place)) & np.uint8(3))
            values[4 * j + place] = np.float32(code - 1) * unit
    return broken == 0


@kernel
def write_levels(mean_N: Float32s, unit: float, n: int, bits: int, out: Bytes) -> bool:
    """Write means of n ternary values as fields: level plus n, where a level is -n to n.

    A mean is fl(fl(level unit) / n) in float32. Fields fill bytes from the lowest bits on.

    Args:
        mean_N: contiguous.
        unit: float32, at least 0.
        n: at least 1.
        bits: of a field, at most 32.
        out: receives ceil(N bits / 8) bytes, and has SPARE_BYTES more.

    Returns:
        False if a value is no such mean.
    """
    step, divisor = np.float32(unit), np.float32(n)
    factor = np.float64(n) / unit if unit > 0 else 0.0
    fits = True
    word, filled, at = np.uint64(0), 0, 0
    for i in range(mean_N.size):
        level = np.int64(np.rint(np.float64(mean_N[i]) * factor)) if fits else np.int64(0)
        fits &= abs(level) <= n
        fits &= np.float32(level) * step / divisor == mean_N[i]
        word |= np.uint64(level + n) << np.uint64(filled)
        filled += bits
        if filled >= 32:
            store64(out, at, word)
            at += 4
            word >>= np.uint64(32)
            filled -= 32
    store64(out, at, word)
    return fits


@kernel
def read_levels(data: Bytes, unit: float, n: int, bits: int, mean_N: Float32s) -> bool:
    """Read means from fields behind which lie SPARE_BYTES.

    Returns:
        False if a field is above 2 n, or a mean not finite.
    """
    step, divisor = np.float32(unit), np.float32(n)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    fits = True
    for i in range(mean_N.size):
        at = i * bits
        field = np.int64((load64(data, at >> 3) >> np.uint64(at & 7)) & mask)
        fits &= field <= 2 * n
        mean_N[i] = np.float32(field - n) * step / divisor
        fits &= abs(mean_N[i]) <= LARGEST
    return fits
