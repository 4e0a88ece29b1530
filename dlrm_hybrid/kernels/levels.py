"""Means of n ternary values as whole numbers from -n to n, in as few bits as these need, and back.

A mean is fl(fl(level unit) / n) in float32. The field of an element is its level plus n; fields
fill bytes from the lowest bits on. Shapes: N elements.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.bits import load64, store64
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

SPARE_BYTES = 8  # behind the fields, to read and to write 64 bits at a time

_LARGEST = np.float32(3.4028235e38)


@kernel
def write_levels(mean_N: Float32s, unit: float, n: int, bits: int, out: Bytes) -> bool:
    """Write the fields of means.

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
def read_levels(given: Bytes, unit: float, n: int, bits: int, mean_N: Float32s) -> bool:
    """Read means from fields behind which lie SPARE_BYTES.

    Returns:
        False if a field is above 2 n, or a mean not finite.
    """
    step, divisor = np.float32(unit), np.float32(n)
    mask = (np.uint64(1) << np.uint64(bits)) - np.uint64(1)
    fits = True
    for i in range(mean_N.size):
        at = i * bits
        field = np.int64((load64(given, at >> 3) >> np.uint64(at & 7)) & mask)
        fits &= field <= 2 * n
        mean_N[i] = np.float32(field - n) * step / divisor
        fits &= abs(mean_N[i]) <= _LARGEST
    return fits
