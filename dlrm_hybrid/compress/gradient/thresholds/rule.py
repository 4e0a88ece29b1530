"""What a threshold rule does, and how many elements it aims at.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.kernels.ops import Ops

_PARTS = 1_000_000


class ThresholdRule(Protocol):
    """Finds a threshold for one tensor; keeps nothing itself, so that all tensors may share it."""

    def init(self) -> dict[str, Tensor]:
        """Fresh state of one tensor: small tensors that checkpoints hold."""
        ...

    def tau(
        self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor], ops: Ops
    ) -> float:
        """A magnitude, float32, that about `k` elements reach.

        Args:
            accumulated_N: gradient plus residual; need not be finite, the result is then of no use.
            k: 1 to N.
            state: of the tensor, as `init` made it, changed in place.
            ops: to compute with.
        """
        ...


def target_k(count: int, sparsity: float) -> int:
    """How many of `count` elements a sparsity leaves: at least one, all at sparsity 0.

    Counts in millionths, for 100 * 0.29 is below 29 in floating point (DCT, algorithm 1, with
    the index of the threshold counted from 0).
    """
    return min(count, max(1, count - count * round(_PARTS * sparsity) // _PARTS))


def above(tau: float) -> float:
    """The smallest float32 above a threshold: for methods that send what exceeds it."""
    return float(np.nextafter(np.float32(tau), np.float32(np.inf)))
