"""A threshold between the mean and the largest magnitude (RedSync, Fang et al., 2019)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.methods.thresholds import RedsyncSettings
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule, above
from dlrm_hybrid.kernels.ops import Ops

NEAR = 0.2  # the search ends at an interval of this length, so after three looks
TRIMMED = (0.8, 0.6, 0.4, 0.2, 0.0)


@final
@dataclass(frozen=True, slots=True)
class Redsync(ThresholdRule):
    """A few looks at how many elements exceed a point between mean and maximum.

    What it ends with may be far off. Where no element exceeds it, as where all magnitudes are
    equal, the threshold is that of exactly `k` elements.
    """

    settings: RedsyncSettings

    @override
    def init(self) -> dict[str, Tensor]:
        return {}

    @override
    def tau(
        self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor], ops: Ops
    ) -> float:
        moments = ops.moments(accumulated_N)
        mean = moments.excess / accumulated_N.size

        def look(part: float) -> tuple[float, int]:
            tau = above(mean + part * (moments.largest - mean))
            return tau, ops.compact(accumulated_N, tau).size

        looks = _bisected(look, k) if self.settings.search == "bisect" else _trimmed(look, k)
        *_, (tau, found) = looks
        return tau if found > 0 else ops.kth_magnitude(accumulated_N, k)


Look = Callable[[float], tuple[float, int]]
"""The threshold at a part of the way from mean to maximum, and how many elements reach it."""


def _bisected(look: Look, k: int) -> Iterator[tuple[float, int]]:
    low, high = 0.0, 1.0
    while high - low > NEAR:
        part = (low + high) / 2
        tau, found = look(part)
        yield tau, found
        if k < found < 2 * k:
            return
        low, high = (low, part) if 2 * found < k else (part, high)


def _trimmed(look: Look, k: int) -> Iterator[tuple[float, int]]:
    for part in TRIMMED:
        tau, found = look(part)
        yield tau, found
        if found >= k:
            return
