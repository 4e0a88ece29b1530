"""A threshold between the mean and the largest magnitude (RedSync, Fang et al., 2019)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.methods.thresholds import RedsyncSettings
from dlrm_hybrid.compress.gradient.thresholds.rule import beyond
from dlrm_hybrid.kernels.histogram import magnitude_of_rank
from dlrm_hybrid.kernels.moments import count_reaching, largest_magnitude, magnitude_sums

NEAR = 0.2  # the search ends at an interval of this length, so after three looks
TRIMMED = (0.8, 0.6, 0.4, 0.2, 0.0)


@final
@dataclass(frozen=True, slots=True)
class Redsync:
    """A few looks at how many elements exceed a point between mean and maximum.

    What it ends with may be far off. Where no element exceeds it, as where all magnitudes are
    equal, the threshold is that of exactly `k` elements.
    """

    settings: RedsyncSettings

    def init(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def tau(self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor]) -> float:
        """The last of the points that were looked at."""
        mean = magnitude_sums(accumulated_N, 0.0)[0] / accumulated_N.size
        top = largest_magnitude(accumulated_N)
        looks = self._bisected if self.settings.search == "bisect" else self._trimmed
        *_, (tau, found) = looks(accumulated_N, k, mean, top)
        return tau if found > 0 else magnitude_of_rank(accumulated_N, k)

    def _bisected(
        self, values_N: NDArray[np.float32], k: int, mean: float, top: float
    ) -> Iterator[tuple[float, int]]:
        low, high = 0.0, 1.0
        while high - low > NEAR:
            part = (low + high) / 2
            tau = beyond(mean + part * (top - mean))
            found = count_reaching(values_N, tau)
            yield tau, found
            if k < found < 2 * k:
                return
            low, high = (low, part) if 2 * found < k else (part, high)

    def _trimmed(
        self, values_N: NDArray[np.float32], k: int, mean: float, top: float
    ) -> Iterator[tuple[float, int]]:
        for part in TRIMMED:
            tau = beyond(mean + part * (top - mean))
            found = count_reaching(values_N, tau)
            yield tau, found
            if found >= k:
                return
