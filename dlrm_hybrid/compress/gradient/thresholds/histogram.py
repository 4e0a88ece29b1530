"""The same threshold by counting, many times faster than by sorting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
from dlrm_hybrid.kernels.ops import Ops


@final
@dataclass(frozen=True, slots=True)
class Histogram(ThresholdRule):
    """Equal to `Exact` wherever the values are finite; see kernels/histogram.py."""

    @override
    def init(self) -> dict[str, Tensor]:
        return {}

    @override
    def tau(
        self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor], ops: Ops
    ) -> float:
        return ops.kth_magnitude(accumulated_N, k)
