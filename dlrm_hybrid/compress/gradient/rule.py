"""What finds a threshold: the protocol of all rules.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeAlias

from typing_extensions import override

if TYPE_CHECKING:
    from torch import Tensor

    from dlrm_hybrid.arrays import Float32s
    from dlrm_hybrid.compress.gradient.context import StageContext

RuleState: TypeAlias = "Mapping[str, Tensor]"
_MILLION = 1_000_000


class ThresholdFinder(Protocol):
    """Finds the threshold of one tensor; remembers nothing itself, so all tensors may share it."""

    def init(self) -> dict[str, Tensor]:
        """Fresh state of one tensor: small tensors that checkpoints hold."""
        return {}

    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        """Find a magnitude, rounded to float32, that about `k` elements reach.

        Args:
            x_N: gradient plus residual; need not be finite, the result is then of no use.
            k: 1 to N.
            state: of the tensor, as `init` made it, changed in place.
        """
        ...


class ThresholdRule(Protocol):
    """A way to find thresholds, as a record of its settings."""

    name: ClassVar[str]
    """Its name in `threshold`."""

    def finder(self, context: StageContext) -> ThresholdFinder:
        """The finder of one trainer's thresholds."""
        ...


class OwnFinder(ThresholdRule, ThresholdFinder, Protocol):
    """A rule that needs nothing of a trainer, and finds thresholds itself."""

    @override
    def finder(self, context: StageContext) -> ThresholdFinder:
        return self


def target_k(count: int, sparsity: float) -> int:
    """How many of `count` elements a sparsity leaves: at least one, all at sparsity 0.

    Counts in millionths, for 100 * 0.29 is below 29 in floating point (DCT, algorithm 1, with
    the index of the threshold counted from 0).
    """
    return min(count, max(1, count - count * round(_MILLION * sparsity) // _MILLION))


def above(tau: float) -> float:
    """The smallest float32 above a threshold: for methods that send what exceeds it."""
    import numpy as np

    return float(np.nextafter(np.float32(tau), np.float32(np.inf)))
