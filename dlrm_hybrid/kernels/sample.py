"""Random elements of a tensor: one of each of many blocks, so none comes twice.

Shapes: N elements, S of them drawn.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]

# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): its n-th number depends on seed and n alone.
STEP = np.uint64(0x9E3779B97F4A7C15)
FIRST = np.uint64(0xBF58476D1CE4E5B9)
SECOND = np.uint64(0x94D049BB133111EB)


@kernel
def sample(values_N: Float32s, seed: int, out_S: Float32s) -> None:
    """Fill `out_S` with elements, in order: one at random of each of S blocks of equal length.

    Args:
        values_N: at least S.
        seed: not negative; the same seed draws the same places.
        out_S: receives them.
    """
    state = np.uint64(seed)
    for place in range(out_S.size):
        first = place * values_N.size // out_S.size
        last = (place + 1) * values_N.size // out_S.size
        state += STEP
        bits = (state ^ (state >> np.uint64(30))) * FIRST
        bits = (bits ^ (bits >> np.uint64(27))) * SECOND
        bits ^= bits >> np.uint64(31)
        out_S[place] = values_N[first + np.int64(bits % np.uint64(last - first))]
