"""float32 to the nearest bfloat16 or float16, ties to even; float16 to its 16 bits and back.

Integers, and float32 where float16 counts in even steps; no branches, so that the loops become
vector instructions. numpy knows no bfloat16, and takes 2 ns to convert one float16.

Shapes: K values.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.halves import nearest_bfloat16
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Words = npt.NDArray[np.uint32]
Halves = npt.NDArray[np.uint16]

_SIGN = np.uint32(0x80000000)
_MAGNITUDE = np.uint32(0x7FFFFFFF)
_INFINITY = np.uint32(0x7F800000)
_QUIET = np.uint32(0x00400000)
_ONE = np.uint32(1)
# What float16 drops of a float32's fraction, half of that less one, and its largest number.
_DROPPED_13, _HALF_13, _LARGEST_13 = np.uint32(0x1FFF), np.uint32(0x0FFF), np.uint32(0x477FE000)
_SHIFT_16, _SHIFT_13 = np.uint32(16), np.uint32(13)
# Below 2**-14 float16 counts in steps of 2**-24, and so does float32 from 0.5 to 1.
_SMALLEST_NORMAL = np.uint32(0x38800000)
_EVEN = np.float32(0.5)
_STEPS, _STEP = np.float32(2.0**24), np.float32(2.0**-24)
# A float16 beside the upper bits of a float32: its exponent is 112 smaller.
_REBASE = np.uint32(112 << 10)
_HALF_SIGN, _HALF_INFINITY = np.uint32(0x8000), np.uint32(0x7C00)


@kernel
def narrow_bfloat16(words_K: Words, out_K: Words) -> None:
    """Round the float32 whose bits are `words_K`; finite values stay finite, NaN stays NaN."""
    for k in range(words_K.size):
        out_K[k] = nearest_bfloat16(words_K[k])


@kernel
def bfloat16_bits(words_K: Words, out_K: Halves) -> None:
    """The 16 bits of the nearest bfloat16 of each."""
    for k in range(words_K.size):
        out_K[k] = nearest_bfloat16(words_K[k]) >> _SHIFT_16


@kernel
def narrow_float16(words_K: Words, values_K: Float32s, out_K: Words, scratch_K: Float32s) -> None:
    """The same for float16; `values_K` and `scratch_K` are `words_K` and `out_K` as floats."""
    for k in range(words_K.size):
        scratch_K[k] = (abs(values_K[k]) + _EVEN) - _EVEN
    for k in range(words_K.size):
        word = words_K[k]
        size = np.uint32(word & _MAGNITUDE)
        even = np.uint32(np.uint32(size >> _SHIFT_13) & _ONE)
        rounded = np.uint32(np.uint32(size + np.uint32(_HALF_13 + even)) & ~_DROPPED_13)
        rounded = min(rounded, _LARGEST_13)
        rounded = out_K[k] if size < _SMALLEST_NORMAL else rounded
        special = np.uint32(np.uint32(size | (_QUIET if size > _INFINITY else 0)) & ~_DROPPED_13)
        out_K[k] = (word & _SIGN) | (special if size >= _INFINITY else rounded)


@kernel
def float16_bits(words_K: Words, values_K: Float32s, out_K: Halves) -> None:
    """The 16 bits of values that float16 holds exactly; both inputs are the same memory."""
    for k in range(words_K.size):
        value = abs(values_K[k])
        # What is too large for small steps, or NaN, has no integer; it is dealt with below.
        out_K[k] = np.int32((value if value < _EVEN else _EVEN) * _STEPS)
    for k in range(words_K.size):
        word = words_K[k]
        size = np.uint32(word & _MAGNITUDE)
        half = np.uint32(np.uint32(size >> _SHIFT_13) - _REBASE)
        half = np.uint32(out_K[k]) if size < _SMALLEST_NORMAL else half
        fraction = np.uint32(np.uint32(size - _INFINITY) >> _SHIFT_13)
        half = np.uint32(_HALF_INFINITY + fraction) if size >= _INFINITY else half
        out_K[k] = np.uint32(np.uint32(word & _SIGN) >> _SHIFT_16) | half


@kernel
def from_float16_bits(halves_K: Halves, out_K: Words, values_K: Float32s) -> None:
    """The values of 16-bit patterns; both outputs are the same memory."""
    for k in range(halves_K.size):
        values_K[k] = np.float32(np.int32(halves_K[k] & np.uint16(0x3FF))) * _STEP
    for k in range(halves_K.size):
        half = np.uint32(halves_K[k])
        size = np.uint32(half & np.uint32(0x7FFF))
        word = np.uint32(np.uint32(size + _REBASE) << _SHIFT_13)
        word = out_K[k] if size < np.uint32(0x400) else word
        special = np.uint32(np.uint32(np.uint32(size - _HALF_INFINITY) << _SHIFT_13) + _INFINITY)
        word = special if size >= _HALF_INFINITY else word
        out_K[k] = word | np.uint32(np.uint32(half & _HALF_SIGN) << _SHIFT_16)
