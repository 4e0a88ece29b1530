"""A threshold from a distribution fitted to the magnitudes (SIDCo, Abdelmoniem et al., MLSys 2021).

A distribution that fits all magnitudes fits the largest badly. So it is fitted in stages: the first
keeps a quarter, each later one is fitted to what exceeds the threshold before. More stages let
fewer of heavy tails through than one does, and more of light ones.

Shapes: N elements of a tensor, K that exceed a threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, isnan, log2, nan
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.layout import Float32s
from dlrm_hybrid.compress.gradient.methods.thresholds import SidcoSettings
from dlrm_hybrid.compress.gradient.thresholds.fits import exponential, gamma, pareto
from dlrm_hybrid.compress.gradient.thresholds.rule import RuleState, ThresholdRule, above
from dlrm_hybrid.kernels.ops import Ops

FEW = 10  # values, to which nothing is fitted
FAR = 4  # times as many as wanted: the estimate is of no use
SAME = 1e-9  # of the squared mean: values that vary less are equal


@final
@dataclass(frozen=True, slots=True)
class Sidco(ThresholdRule):
    """Estimates the threshold by fitting a distribution in stages (Abdelmoniem et al., MLSys 2021).

    Their number is adapted to how many elements the estimates let through.

    Zeros are left out of every fit. Where nothing can be fitted, and where no element or more than
    4 times too many would be sent, the threshold is that of exactly `k` elements.
    """

    settings: SidcoSettings

    @override
    def init(self) -> dict[str, Tensor]:
        adaptation = self.settings.adaptation
        stages = adaptation if isinstance(adaptation, int) else 1
        return {
            "stages": torch.tensor([stages, 1, 0, 0], device="cpu"),
            "stage_error": torch.zeros(1, dtype=torch.float64, device="cpu"),
        }

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        nonzero = int(np.count_nonzero(x_N))
        if k >= nonzero:
            return 0.0
        most = max(1, ceil(log2(nonzero / k)))
        stages = min(int(state["stages"][0].item()), most)
        [(_, tau, found)] = self._estimates(x_N, k, nonzero, [stages], ops)
        if not isnan(tau) and self.window_ends(found, state):
            outside = self.stray(state, k, most)
            if outside and self.settings.adaptation == "best":
                tau, found = self._best(x_N, k, nonzero, most, state, ops)
        if isnan(tau) or not 0 < found <= FAR * k:
            return ops.kth_magnitude(x_N, k)
        return tau

    def _estimates(
        self, values_N: Float32s, k: int, nonzero: int, choices: Iterable[int], ops: Ops
    ) -> Iterator[tuple[int, float, int]]:
        """For each number of stages the threshold, NaN if there is none, and what reaches it."""
        density = k / nonzero
        shared: tuple[float, Float32s] | None = None
        for stages in choices:
            if stages == 1 or density >= self.settings.first_density:
                tau, rest_K = self._first(values_N, nonzero, density, ops), values_N
            else:
                if shared is None:
                    tau = self._first(values_N, nonzero, self.settings.first_density, ops)
                    shared = tau, _exceeding(values_N, tau, ops)
                tau, rest_K = shared
                ratio = (density / self.settings.first_density) ** (1 / (stages - 1))
                for stage in range(stages - 1):
                    rest_K = _exceeding(rest_K, tau, ops) if stage else rest_K
                    mean, variance = _moments(rest_K, tau, rest_K.size, ops)
                    tau += self._fit(mean, variance, ratio)
            yield stages, tau, 0 if isnan(tau) else ops.compact(rest_K, tau).size

    def _first(self, values_N: Float32s, nonzero: int, ratio: float, ops: Ops) -> float:
        mean, variance = _moments(values_N, 0.0, nonzero, ops)
        if self.settings.distribution == "gamma" and not isnan(variance):
            logs = np.log(np.abs(values_N[values_N != 0]), dtype=np.float64)
            return gamma(
                mean, float(logs.sum()) / nonzero, ratio, is_exact=self.settings.gamma == "exact"
            )
        return self._fit(mean, variance, ratio)

    def _fit(self, mean: float, variance: float, ratio: float) -> float:
        if isnan(variance):
            return nan
        if self.settings.distribution == "exponential":
            return exponential(mean, ratio)
        return pareto(mean, variance, ratio)

    def window_ends(self, found: int, state: RuleState) -> bool:
        """Count an estimate and what it has let through; whether it is the last of its window."""
        counts = state["stages"].numpy()
        counts[2:] += (1, found)
        return (
            not isinstance(self.settings.adaptation, int) and counts.item(2) >= self.settings.window
        )

    def stray(self, state: RuleState, k: int, most: int) -> bool:
        """Begin a new window; whether the estimates of the last one were out of tolerance.

        The paper's code divides by one more than it has added up; this is the mean.
        """
        counts = state["stages"].numpy()
        stages, direction, estimates, elements = counts.tolist()
        counts[2:] = 0
        quality = elements / (estimates * k)
        error, before = abs(quality - 1), state["stage_error"].item()
        state["stage_error"][0] = error
        if error <= self.settings.tolerance:
            return False
        if self.settings.adaptation == "flip" and error > before > 0:
            direction = -direction
        if self.settings.adaptation != "best":
            step = -direction if quality > 1 else direction
            counts[:2] = (min(max(stages + step, 1), most), direction)
        return True

    def _best(
        self,
        values_N: Float32s,
        k: int,
        nonzero: int,
        most: int,
        state: RuleState,
        ops: Ops,
    ) -> tuple[float, int]:
        """The number of stages that comes nearest, the smallest of equals."""
        tried = self._estimates(values_N, k, nonzero, range(1, most + 1), ops)
        known = [one for one in tried if not isnan(one[1])]
        stages, tau, found = min(known, key=lambda one: (abs(one[2] - k), one[0]))
        state["stages"][0] = stages
        return tau, found


def _exceeding(values_N: Float32s, tau: float, ops: Ops) -> Float32s:
    """The magnitudes above a threshold, in memory of their own; none if it is NaN."""
    if isnan(tau):
        return np.empty(0, np.float32)
    return np.abs(values_N[ops.compact(values_N, above(tau))])


def _moments(values_N: Float32s, shift: float, count: int, ops: Ops) -> tuple[float, float]:
    """Mean and unbiased variance of `count` magnitudes less a shift; NaN if nothing can be fitted.

    Zeros may stand among the values where the shift is 0.
    """
    if count < FEW:
        return nan, nan
    _, total, squares, _ = ops.moments(values_N, shift)
    mean = total / count
    variance = (squares - mean * total) / (count - 1)
    return mean, variance if variance > SAME * mean * mean else nan
