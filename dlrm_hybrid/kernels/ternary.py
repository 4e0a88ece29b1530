"""Values as -1, 0 or 1 times a scale, drawn so that the mean is the value; packed, and back.

A code is the sign plus one. Two ways to pack: 2 bits each, four to a byte from the lowest bits on,
filled up with codes for zero; or five to a byte as digits of base 3, where byte j of M holds the
elements j, j + M, … j + 4 M, the lowest digit first (W. Wen et al., TernGrad, NIPS 2017).

Element i draws from the counter i and a key, so what is drawn depends on nothing else: not on the
way of packing, not on what was drawn before. The key is scrambled once; for every element a mixer
of shifts and odd multipliers, as MurmurHash3 ends with, turns it and the counter into 24 bits.

Shapes: N values, M bytes, K of either that are dealt with together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Float64s = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]

TRITS = 5  # to a byte
LARGEST = 242  # byte of five digits

_LANES = 64
_BLOCK = 4096  # codes that stay in the nearest cache until they are packed
_ODD = np.uint32(0x9E3779B9)
_FIRST, _SECOND = np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97)
_SHIFT_16, _SHIFT_15, _SHIFT_8 = np.uint32(16), np.uint32(15), np.uint32(8)
_UNIT = np.float32(2.0**-24)
_LOW = np.uint8(0x55)
_WORD = np.uint64(0xFFFFFFFF)
_ZEROS = np.uint8(0x55)


@kernel
def measure(values_N: Float32s) -> tuple[float, float, float]:
    """Sum, sum of squares and largest magnitude, in one pass.

    Sums are float64, in lanes of a fixed width: the same on every machine. If a value is not
    finite neither is the sum of squares.
    """
    sums, squares = np.zeros(_LANES), np.zeros(_LANES)
    sizes = np.zeros(_LANES, np.float32)
    whole = values_N.size // _LANES * _LANES
    for first in range(0, whole, _LANES):
        own = values_N[first : first + _LANES]
        for lane in range(_LANES):
            value = own[lane]
            wide = np.float64(value)
            sums[lane] += wide
            squares[lane] += wide * wide
            size = abs(value)
            sizes[lane] = size if size > sizes[lane] else sizes[lane]
    total, square, largest = 0.0, 0.0, np.float32(0)
    for lane in range(_LANES):
        total += sums[lane]
        square += squares[lane]
        largest = max(largest, sizes[lane])
    for i in range(whole, values_N.size):
        wide = np.float64(values_N[i])
        total += wide
        square += wide * wide
        largest = max(largest, abs(values_N[i]))
    return total, square, np.float64(largest)


@kernel
def _scrambled(key: np.uint64) -> np.uint64:
    """A word in which every bit hangs on every bit of the key (S. Vigna's splitmix64)."""
    key = np.uint64(key + np.uint64(0x9E3779B97F4A7C15))
    key = np.uint64((key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9))
    key = np.uint64((key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB))
    return np.uint64(key ^ (key >> np.uint64(31)))


@kernel
def _draw(
    own_K: Float32s, first: int, limit: np.float32, scale: np.float32, key: int, codes: Bytes
) -> None:
    """Codes of the K values that follow each other from number `first` on."""
    word = _scrambled(np.uint64(key))
    low, high = np.uint32(word & _WORD), np.uint32(word >> np.uint64(32))
    start = np.uint32(low + np.uint32(np.uint32(first) * _ODD))
    for i in range(own_K.size):
        mixed = np.uint32(np.uint32(np.uint32(i) * _ODD) + start)
        mixed = np.uint32(mixed ^ np.uint32(mixed >> _SHIFT_16))
        mixed = np.uint32(mixed * _FIRST)
        mixed = np.uint32(np.uint32(mixed ^ np.uint32(mixed >> _SHIFT_15)) ^ high)
        mixed = np.uint32(mixed * _SECOND)
        mixed = np.uint32(mixed ^ np.uint32(mixed >> _SHIFT_15))
        chance = np.float32(np.int32(np.uint32(mixed >> _SHIFT_8))) * _UNIT
        value = own_K[i]
        size = min(abs(value), limit)
        fires = chance * scale < size
        sign = np.int32(value > 0) - np.int32(value < 0)
        codes[i] = np.uint8(1 + (sign if fires else 0))


@kernel
def ternarise_bits(values_N: Float32s, limit: float, scale: float, key: int, out_M: Bytes) -> None:
    """Draw codes, and pack them in 2 bits each.

    Args:
        values_N: contiguous, finite.
        limit: magnitude at which values are clipped.
        scale: at least every clipped magnitude.
        key: of the draws, 63 bits.
        out_M: receives ceil(N / 4) bytes.
    """
    codes = np.empty(_BLOCK, np.uint8)
    for first in range(0, values_N.size, _BLOCK):
        count = min(_BLOCK, values_N.size - first)
        filled = (count + 3) // 4 * 4
        for i in range(count, filled):
            codes[i] = 1
        own_K = values_N[first : first + count]
        _draw(own_K, first, np.float32(limit), np.float32(scale), key, codes)
        words = codes[:filled].view(np.uint32)
        packed = out_M[first // 4 :]
        for j in range(words.size):
            word = words[j]
            packed[j] = np.uint8(
                (word | (word >> np.uint32(6)) | (word >> np.uint32(12)) | (word >> np.uint32(18)))
                & np.uint32(0xFF)
            )


@kernel
def ternarise_trits(values_N: Float32s, limit: float, scale: float, key: int, out_M: Bytes) -> None:
    """As `ternarise_bits`, in base 3; `out_M` receives ceil(N / 5) bytes."""
    codes = np.empty(_BLOCK, np.uint8)
    planes = out_M.size
    for start in range(0, planes, _BLOCK):
        packed = out_M[start : min(start + _BLOCK, planes)]
        weight = np.uint8(1)
        for trit in range(TRITS):
            first = trit * planes + start
            count = max(0, min(packed.size, values_N.size - first))
            for i in range(count, packed.size):
                codes[i] = 1
            own_K = values_N[first : first + count]
            _draw(own_K, first, np.float32(limit), np.float32(scale), key, codes)
            for j in range(packed.size):
                digit = np.uint8(weight * codes[j])
                packed[j] = digit if trit == 0 else np.uint8(packed[j] + digit)
            weight = np.uint8(weight * 3)


@kernel
def read_bits(packed_M: Bytes, scale: float, values_N: Float32s) -> bool:
    """The values of codes in 2 bits each; False if a code is none, or filling is not zero."""
    unit = np.float32(scale)
    broken = np.uint8(0)
    whole = values_N.size // 4
    for j in range(whole):
        byte = packed_M[j]
        broken |= byte & (byte >> np.uint8(1)) & _LOW
        for place in range(4):
            code = np.int32((byte >> np.uint8(2 * place)) & np.uint8(3))
            values_N[4 * j + place] = np.float32(code - 1) * unit
    rest = values_N.size - 4 * whole
    if rest > 0:
        byte = packed_M[whole]
        broken |= byte & (byte >> np.uint8(1)) & _LOW
        broken |= (byte ^ _ZEROS) >> np.uint8(2 * rest)
        for place in range(rest):
            code = np.int32((byte >> np.uint8(2 * place)) & np.uint8(3))
            values_N[4 * whole + place] = np.float32(code - 1) * unit
    return broken == 0


@kernel
def read_trits(packed_M: Bytes, scale: float, values_N: Float32s) -> bool:
    """The values of codes in base 3; False if a byte has more digits, or filling is not zero."""
    unit = np.float32(scale)
    planes = packed_M.size
    rest = np.empty(_BLOCK, np.uint8)
    broken = False
    for start in range(0, planes, _BLOCK):
        own_K = packed_M[start : min(start + _BLOCK, planes)]
        for j in range(own_K.size):
            rest[j] = own_K[j]
            broken |= own_K[j] > LARGEST
        for trit in range(TRITS):
            first = trit * planes + start
            count = max(0, min(own_K.size, values_N.size - first))
            out_K = values_N[first : first + count]
            for j in range(own_K.size):
                third = (np.uint32(rest[j]) * np.uint32(171)) >> np.uint32(9)  # a byte over 3
                digit = np.int32(rest[j]) - np.int32(third) * 3
                rest[j] = third
                if j < count:
                    out_K[j] = np.float32(digit - 1) * unit
                else:
                    broken |= digit != 1
    return not broken
