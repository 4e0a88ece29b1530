"""Named random streams: each has a seed derived from the run's and from its name."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def fold(seed: int, *names: str | int) -> int:
    """Derive a 63-bit seed from `seed` and names, equal on every machine.

    Example:
        >>> fold(7, "loader", 0) == fold(7, "loader", 0)
        True
        >>> fold(7, "loader", 0) == fold(7, "loader", 1)
        False
    """
    text = "\x1f".join([str(seed), *(f"{type(name).__name__}:{name}" for name in names)])
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def splitmix64(seed: int, count: int, first: int = 1) -> NDArray[np.uint64]:
    """Counter-based random numbers: each depends on seed and position alone.

    Args:
        seed: not negative, below 2**64.
        first: position of the first number.

    Source: Steele, Lea and Flood, Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    import numpy as np  # seeds are folded where nothing else needs it

    return hashed(seed, np.arange(first, first + count, dtype=np.uint64))


def hashed(seed: int, positions: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The random numbers of `splitmix64` at any positions, in an array of their shape."""
    import numpy as np

    state = np.uint64(seed) + positions * np.uint64(0x9E3779B97F4A7C15)
    bits = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def drawn(seed: int, positions: NDArray[np.uint64], bound: int) -> NDArray[np.uint64]:
    """Random whole numbers from 0 to `bound` - 1: each depends on seed and position alone.

    Args:
        seed: not negative, below 2**64.
        positions: of any shape.
        bound: at most 2**32; no number is likelier than another by more than bound / 2**32.
    """
    import numpy as np

    high, half = hashed(seed, positions), np.uint64(32)
    return ((high >> half) * np.uint64(bound)) >> half
