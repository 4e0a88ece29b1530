"""One magnitude for all tensors and steps (Sahu et al., NeurIPS 2021: hard threshold)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
from dlrm_hybrid.kernels.ops import Ops


@final
@dataclass(frozen=True, slots=True)
class Hard(ThresholdRule):
    """What is given, whatever the values are: how many elements reach it is left to chance.

    Attributes:
        magnitude: above 0.
    """

    magnitude: float

    @override
    def init(self) -> dict[str, Tensor]:
        return {}

    @override
    def tau(
        self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor], ops: Ops
    ) -> float:
        return self.magnitude


def usual_magnitude(k: int) -> float:
    """What is used where nothing is known: 1 / (2 √k), `k` elements of the whole model."""
    return 1 / (2 * sqrt(k))
