"""The threshold that a normal distribution would have (GaussianKSGD, Shi et al., 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import NormalDist
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.methods.thresholds import GaussianSettings
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule, above
from dlrm_hybrid.kernels.ops import Ops

LOOKS = 3
LOWER, HIGHER = 0.5, 1.5


@final
@dataclass(frozen=True, slots=True)
class Gaussian(ThresholdRule):
    """A fit, halved where less than ⅔ of what is wanted exceeds it, times 1.5 where more than 4/3.

    What it ends with may be far off. Where no element exceeds it, the largest leaves.
    """

    settings: GaussianSettings

    @override
    def init(self) -> dict[str, Tensor]:
        return {}

    @override
    def tau(
        self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor], ops: Ops
    ) -> float:
        count = accumulated_N.size
        is_signed = self.settings.fit == "signed"
        moments = ops.moments(accumulated_N)
        total = moments.total if is_signed else moments.excess
        mean = total / count
        variance = max(0.0, moments.squares - mean * total) / max(1, count - 1)
        quantile = NormalDist().inv_cdf(1 - k / count / 2)
        tau = max(0.0, mean + quantile * sqrt(variance)) if isfinite(variance) else 0.0
        found = 0
        for look in range(LOOKS):
            found = ops.compact(accumulated_N, above(tau)).size
            if 2 * k <= 3 * found <= 4 * k or look == LOOKS - 1:
                break
            tau *= LOWER if 3 * found < 2 * k else HIGHER
        return above(tau) if found > 0 else ops.kth_magnitude(accumulated_N, 1)
