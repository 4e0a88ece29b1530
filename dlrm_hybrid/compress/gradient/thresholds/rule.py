"""What finds a threshold: the protocol of all rules, and those that only count or are given one.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, Protocol, final

import numpy as np
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.layout import Float32s

if TYPE_CHECKING:
    from dlrm_hybrid.kernels.ops import Ops  # loads numba

_MILLION = 1_000_000

RuleState = Mapping[str, Tensor]


class ThresholdRule(Protocol):
    """Finds the threshold of one tensor; remembers nothing itself, so all tensors may share it."""

    def init(self) -> dict[str, Tensor]:
        """Fresh state of one tensor: small tensors that checkpoints hold."""
        return {}

    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        """Find a magnitude, rounded to float32, that about `k` elements reach.

        Args:
            x_N: gradient plus residual; need not be finite, the result is then of no use.
            k: 1 to N.
            state: of the tensor, as `init` made it, changed in place.
            ops: to compute with.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class Exact(ThresholdRule):
    """The paper's threshold by partial sorting: element N - k of the ascending magnitudes.

    DCT (Gupta et al., KDD 2021), algorithm 1.
    """

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        return float(np.partition(np.abs(x_N), x_N.size - k)[x_N.size - k])


@final
@dataclass(frozen=True, slots=True)
class Histogram(ThresholdRule):
    """The threshold of `Exact` by counting, many times faster; see kernels/magnitudes.py.

    Equal to it wherever the values are finite.
    """

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        return ops.kth_magnitude(x_N, k)


@final
@dataclass(frozen=True, slots=True)
class Hard(ThresholdRule):
    """One magnitude for all tensors and steps (Sahu et al., NeurIPS 2021: hard threshold).

    How many elements reach it is left to chance.

    Attributes:
        magnitude: above 0.
    """

    magnitude: float

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        return self.magnitude


def usual_magnitude(k: int) -> float:
    """The magnitude for `Hard` where nothing is known: 1 / (2 √k), `k` elements of the model."""
    return 1 / (2 * sqrt(k))


def target_k(count: int, sparsity: float) -> int:
    """How many of `count` elements a sparsity leaves: at least one, all at sparsity 0.

    Counts in millionths, for 100 * 0.29 is below 29 in floating point (DCT, algorithm 1, with
    the index of the threshold counted from 0).
    """
    return min(count, max(1, count - count * round(_MILLION * sparsity) // _MILLION))


def above(tau: float) -> float:
    """The smallest float32 above a threshold: for methods that send what exceeds it."""
    return float(np.nextafter(np.float32(tau), np.float32(np.inf)))
