"""Permutations that are the same on every machine and with every version of numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def permutation(seed: int, count: int) -> npt.NDArray[np.uint32]:
    """All of 0 … count - 1 in an order that depends on `seed` alone.

    Sorts the numbers by a hash of (seed, number), splitmix64 (Steele, Lea, Flood, OOPSLA 2014).
    The number takes the hash's lowest bits, so no two keys are equal, every sort gives the same
    result, and sorting plain integers is enough.

    Args:
        seed: 0 ≤ seed < 2**64, from `rng.fold`.
        count: at most 2**32.
    """
    numbers = np.arange(count, dtype=np.uint64)
    with np.errstate(over="ignore"):
        key = numbers * np.uint64(GOLDEN_GAMMA) + np.uint64(seed)
        key = (key ^ (key >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        key = (key ^ (key >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        key ^= key >> np.uint64(31)
    low_bits = np.uint64((1 << max(count - 1, 0).bit_length()) - 1)
    key = (key & ~low_bits) | numbers
    key.sort()
    return (key & low_bits).astype(np.uint32)
