"""Rules that begin with a guess from moments and take a few looks at how many elements exceed it.

What they end with may be far off.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import NormalDist
from typing import final

from typing_extensions import override

from dlrm_hybrid.compress.gradient.layout import Float32s
from dlrm_hybrid.compress.gradient.methods.thresholds import GaussianSettings, RedsyncSettings
from dlrm_hybrid.compress.gradient.thresholds.rule import RuleState, ThresholdRule, above
from dlrm_hybrid.kernels.ops import Ops

GAUSSIAN_LOOKS = 3
LOWER, HIGHER = 0.5, 1.5
NEAR = 0.2  # the bisection ends at an interval of this length, so after three looks
TRIMMED = (0.8, 0.6, 0.4, 0.2, 0.0)


@final
@dataclass(frozen=True, slots=True)
class Gaussian(ThresholdRule):
    """The threshold that a normal distribution would have (GaussianKSGD, Shi et al., 2019).

    It is halved where less than ⅔ of what is wanted exceeds it, times 1.5 where more than 4/3.
    Where no element exceeds it, the largest is sent.
    """

    settings: GaussianSettings

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        is_signed = self.settings.fit == "signed"
        moments = ops.moments(x_N)
        total = moments.total if is_signed else moments.excess
        mean = total / x_N.size
        variance = max(0.0, moments.squares - mean * total) / max(1, x_N.size - 1)
        quantile = NormalDist().inv_cdf(1 - k / x_N.size / 2)
        tau = max(0.0, mean + quantile * sqrt(variance)) if isfinite(variance) else 0.0
        found = 0
        for look in range(GAUSSIAN_LOOKS):
            found = ops.compact(x_N, above(tau)).size
            if 2 * k <= 3 * found <= 4 * k or look == GAUSSIAN_LOOKS - 1:
                break
            tau *= LOWER if 3 * found < 2 * k else HIGHER
        return above(tau) if found > 0 else ops.kth_magnitude(x_N, 1)


@final
@dataclass(frozen=True, slots=True)
class Redsync(ThresholdRule):
    """A threshold between mean and maximum (RedSync, Fang et al., 2019).

    Where no element exceeds it, as where all magnitudes are equal, it is that of exactly `k`.
    """

    settings: RedsyncSettings

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        moments = ops.moments(x_N)
        mean = moments.excess / x_N.size

        def look(part: float) -> tuple[float, int]:
            tau = above(mean + part * (moments.largest - mean))
            return tau, ops.compact(x_N, tau).size

        looks = _bisected(look, k) if self.settings.search == "bisect" else _trimmed(look, k)
        *_, (tau, found) = looks
        return tau if found > 0 else ops.kth_magnitude(x_N, k)


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
