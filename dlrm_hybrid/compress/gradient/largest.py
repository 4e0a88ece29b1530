"""The k largest elements of a vector, exactly: equal ones by position.

Shapes: N elements, K chosen.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.histogram import magnitude_of_rank
from dlrm_hybrid.kernels.largest import list_largest


def largest(values_N: NDArray[np.float32], count: int) -> NDArray[np.int32]:
    """Positions of the `count` largest magnitudes, ascending; fewer where the rest is zero.

    Args:
        values_N: float32, contiguous, finite.
        count: 0 to N.
    """
    if count == 0:
        return np.empty(0, np.int32)
    indices_N = np.empty(values_N.size, np.int32)
    tau = magnitude_of_rank(values_N, count)
    return indices_N[: list_largest(values_N, tau, count, indices_N)].copy()
