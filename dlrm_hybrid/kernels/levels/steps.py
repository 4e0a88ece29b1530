"""Values of rows as integer levels of their row's step, and back.

A row has one step, a float32 of three significant bits; its largest magnitude is about 7/8 * 2**b
steps, where levels have b bits. So level times step is exact, and plain float operations find the
same step anywhere: to add and to take away what is 2**21 times as large leaves three bits (T. J.
Dekker, Numer. Math. 18, 1971). An exponent and two bits name a step: its code, the upper bits of a
float's.

Shapes: K values of B rows of N units; S symbols.
"""

from __future__ import annotations

import numpy as np

from dlrm_hybrid.arrays import Bytes, Float32s, Float64s, Int16s, Int32s, Int64s
from dlrm_hybrid.kernels.jit import kernel

# Of a row's largest magnitude; beyond them it is as if it were one of them.
SMALLEST_TOP, LARGEST_TOP = np.float32(2.0**-100), np.float32(2.0**100)
LOWEST_CODE, HIGHEST_CODE = 64, 920  # of their steps, and a little more
SPLITTER = 2.0**21 + 1
_SEVENTH = np.float32(1 / 7)
_CODE_SHIFT = np.uint32(21)
_SPLITTER = np.float32(SPLITTER)


def inverse_aim(bits: int) -> float:
    """The factor from a row's largest magnitude to its step; the product is the same anywhere."""
    return float(_SEVENTH) / 2 ** (bits - 3)


@kernel
def quantise(
    indices_K: Int32s,
    values_K: Float32s,
    width: int,
    bits: int,
    is_gradient: bool,
    levels_K: Int16s,
    codes_B: Int16s,
) -> bool:
    """Find the step of every row and the nearest level of every value; False if one is not finite.

    What rounding takes from a gradient joins its unit's next one: else units whose gradients are
    small in every row would learn nothing. So of a unit less than a step is missing in the sum over
    the rows, while a small row may get half a large one's step (error diffusion, as of greys).

    Args:
        indices_K: flat, increasing.
        values_K: values of the elements.
        width: N.
        bits: of a level's magnitude.
        is_gradient: levels may be 0, and what rounding takes is passed on; else 1 is the least.
        levels_K: receives the levels.
        codes_B: receives the codes of steps, 0 where no value of a row is other than 0.
    """
    least, most = np.float32(not is_gradient), np.float32((1 << bits) - 1)
    inverse = _SEVENTH * np.float32(8) / np.float32(1 << bits)
    step_1 = np.empty(1, np.float32)
    rest_N = np.zeros(width, np.float32)
    k = 0
    for row in range(codes_B.size):
        first, start, end = k, row * width, (row + 1) * width
        top = np.float32(0)
        finite = True
        while k < indices_K.size and indices_K[k] < end:
            size = abs(values_K[k] + rest_N[indices_K[k] - start])
            finite &= np.isfinite(size)
            top = max(top, size)
            k += 1
        if not finite:
            return False
        codes_B[row] = 0
        if top == 0:
            for at in range(first, k):
                levels_K[at] = 0
                rest_N[indices_K[at] - start] = 0  # where it is what has made a value 0
            continue
        exact = min(max(top, SMALLEST_TOP), LARGEST_TOP) * inverse
        split = exact * _SPLITTER
        step = step_1[0] = split - (split - exact)
        codes_B[row] = np.int16(step_1.view(np.uint32)[0] >> _CODE_SHIFT)
        for at in range(first, k):
            unit = indices_K[at] - start
            value = values_K[at] + rest_N[unit]
            size = max(min(np.rint(abs(value) / step), most), least)
            levels_K[at] = np.int16(size) if value >= 0 else -np.int16(size)
            if is_gradient:
                rest_N[unit] = value - np.float32(levels_K[at]) * step
    return True


@kernel
def restore(indices_K: Int32s, levels_K: Int16s, codes_B: Int16s, values_BN: Float32s) -> None:
    """Write level times step of every element, and 0 to all others.

    Args:
        indices_K: flat, increasing.
        levels_K: levels of the elements.
        codes_B: codes of the rows' steps.
        values_BN: receives the values; contiguous.
    """
    width, k = values_BN.shape[1], 0
    step_1 = np.empty(1, np.uint32)
    values_BN[:] = 0
    for row in range(codes_B.size):
        start = row * width
        step_1[0] = np.uint32(codes_B[row]) << _CODE_SHIFT
        step = step_1.view(np.float32)[0]
        while k < indices_K.size and indices_K[k] < start + width:
            values_BN[row, indices_K[k] - start] = np.float32(levels_K[k]) * step
            k += 1


@kernel
def flip(indices_K: Int32s, levels_K: Int16s, width: int, mean_N: Float64s, flips_B: Bytes) -> None:
    """Turn every row to where those before it were; say which were turned.

    Args:
        indices_K: flat, increasing.
        levels_K: of them; those of turned rows change their sign.
        width: N.
        mean_N: sum of all levels so far, turned; grows.
        flips_B: receives 1 for a row that was turned.
    """
    k = 0
    for row in range(flips_B.size):
        first, start = k, row * width
        dot = 0.0
        while k < indices_K.size and indices_K[k] < start + width:
            dot += mean_N[indices_K[k] - start] * levels_K[k]
            k += 1
        flips_B[row] = dot < 0
        for at in range(first, k):
            if dot < 0:
                levels_K[at] = -levels_K[at]
            mean_N[indices_K[at] - start] += levels_K[at]


@kernel
def count_symbols(
    indices_K: Int32s, levels_K: Int16s, width: int, added: int, low_bits: int, counts_NS: Int64s
) -> None:
    """Count the symbol of every level, (|level| or level + `added`) >> low_bits, by unit."""
    start = 0
    for k in range(indices_K.size):
        while indices_K[k] >= start + width:
            start += width
        level = np.int64(levels_K[k])
        value = level + added if added else abs(level)
        counts_NS[indices_K[k] - start, value >> low_bits] += 1
