"""`gradient=sidco`: a threshold from a distribution fitted to the magnitudes in stages.

A distribution that fits all magnitudes fits the largest badly. So it is fitted in stages: the first
keeps a quarter, each later one is fitted to what exceeds the threshold before. More stages let
fewer of heavy tails through than one does, and more of light ones (SIDCo, Abdelmoniem et al., MLSys
2021).

Shapes: N elements of a tensor, K that exceed a threshold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import ceil, expm1, inf, isfinite, isnan, lgamma, log, log2, nan, sqrt
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, final

from typing_extensions import override

from dlrm_hybrid.bounds import BetweenZeroAndOne, Bound, Positive
from dlrm_hybrid.compress.gradient.methods.thresholded import Thresholded
from dlrm_hybrid.compress.gradient.rule import OwnFinder, above

if TYPE_CHECKING:
    from torch import Tensor

    from dlrm_hybrid.arrays import Float32s
    from dlrm_hybrid.compress.gradient.rule import RuleState

FEW = 10  # values, to which nothing is fitted
FAR = 4  # times as many as wanted: the estimate is of no use
SAME = 1e-9  # of the squared mean: values that vary less are equal
TINY = 1e-6
STEPS = 80  # of a bisection in float64


@final
@dataclass(frozen=True, kw_only=True)
class Sidco(Thresholded, OwnFinder):
    """SIDCo: multi-stage fit of a sparsity-inducing distribution (Abdelmoniem et al., MLSys 2021).

    Zeros are left out of every fit. Where nothing can be fitted, and where no element or more than
    4 times too many would be sent, the threshold is that of exactly `k` elements.

    Attributes:
        distribution: family that is fitted to the magnitudes: E, GP (a gamma, then Pareto) or P.
        adaptation: how the number of stages adapts to the density achieved, or a fixed number.
            `best` tries all numbers on the values at hand. `literal` is the paper's: one less where
            too many are let through, one more where too few, which is the wrong way for heavy
            tails. `flip` turns that direction round whenever the error has grown.
        window: number of estimates between two adaptations.
        tolerance: relative error of k that triggers no adaptation.
        first_density: fraction kept by the first of several stages.
        gamma: inverse of the gamma distribution: exact, or a closed-form bound.
    """

    name: ClassVar[str] = "sidco"
    distribution: Literal["exponential", "gamma", "pareto"] = "exponential"
    adaptation: Literal["best", "literal", "flip"] | Annotated[int, Bound(ge=1, le=32)] = "best"
    window: Positive = 5
    tolerance: BetweenZeroAndOne = 0.2
    first_density: BetweenZeroAndOne = 0.25
    gamma: Literal["exact", "closed"] = "exact"

    @override
    def init(self) -> dict[str, Tensor]:
        import torch

        adaptation = self.adaptation
        stages = adaptation if isinstance(adaptation, int) else 1
        return {
            "stages": torch.tensor([stages, 1, 0, 0], device="cpu"),
            "stage_error": torch.zeros(1, dtype=torch.float64, device="cpu"),
        }

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        import numpy as np

        from dlrm_hybrid.kernels import magnitudes

        nonzero = int(np.count_nonzero(x_N))
        if k >= nonzero:
            return 0.0
        most = max(1, ceil(log2(nonzero / k)))
        stages = min(int(state["stages"][0].item()), most)
        [(_, tau, count)] = self._estimates(x_N, k, nonzero, [stages])
        if not isnan(tau) and self.window_ends(count, state):
            outside = self.stray(state, k, most)
            if outside and self.adaptation == "best":
                tau, count = self._best(x_N, k, nonzero, most, state)
        if isnan(tau) or not 0 < count <= FAR * k:
            return magnitudes.kth_magnitude(x_N, k)
        return tau

    def _estimates(
        self, values_N: Float32s, k: int, nonzero: int, choices: Iterable[int]
    ) -> Iterator[tuple[int, float, int]]:
        """For each number of stages the threshold, NaN if there is none, and what reaches it."""
        from dlrm_hybrid.kernels import magnitudes

        density = k / nonzero
        shared: tuple[float, Float32s] | None = None
        for stages in choices:
            if stages == 1 or density >= self.first_density:
                tau, rest_K = self._first(values_N, nonzero, density), values_N
            else:
                if shared is None:
                    tau = self._first(values_N, nonzero, self.first_density)
                    shared = tau, _exceeding(values_N, tau)
                tau, rest_K = shared
                ratio = (density / self.first_density) ** (1 / (stages - 1))
                for stage in range(stages - 1):
                    rest_K = _exceeding(rest_K, tau) if stage else rest_K
                    mean, variance = _moments(rest_K, tau, rest_K.size)
                    tau += self._fit(mean, variance, ratio)
            yield stages, tau, 0 if isnan(tau) else magnitudes.reaching(rest_K, tau).size

    def _first(self, values_N: Float32s, nonzero: int, ratio: float) -> float:
        mean, variance = _moments(values_N, 0.0, nonzero)
        if self.distribution == "gamma" and not isnan(variance):
            import numpy as np

            logs = np.log(np.abs(values_N[values_N != 0]), dtype=np.float64)
            return gamma(mean, float(logs.sum()) / nonzero, ratio, is_exact=self.gamma == "exact")
        return self._fit(mean, variance, ratio)

    def _fit(self, mean: float, variance: float, ratio: float) -> float:
        if isnan(variance):
            return nan
        if self.distribution == "exponential":
            return exponential(mean, ratio)
        return pareto(mean, variance, ratio)

    def window_ends(self, count: int, state: RuleState) -> bool:
        """Count an estimate and what it has let through; whether it is the last of its window."""
        counts = state["stages"].numpy()
        counts[2:] += (1, count)
        return not isinstance(self.adaptation, int) and counts.item(2) >= self.window

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
        if error <= self.tolerance:
            return False
        if self.adaptation == "flip" and error > before > 0:
            direction = -direction
        if self.adaptation != "best":
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
    ) -> tuple[float, int]:
        """Take the number of stages that comes nearest to k, the smallest of equals."""
        estimates = self._estimates(values_N, k, nonzero, range(1, most + 1))
        valid = [e for e in estimates if not isnan(e[1])]
        stages, tau, count = min(valid, key=lambda e: (abs(e[2] - k), e[0]))
        state["stages"][0] = stages
        return tau, count


def _exceeding(values_N: Float32s, tau: float) -> Float32s:
    """The magnitudes above a threshold, in memory of their own; none if it is NaN."""
    import numpy as np

    from dlrm_hybrid.kernels import magnitudes

    if isnan(tau):
        return np.empty(0, np.float32)
    return np.abs(values_N[magnitudes.reaching(values_N, above(tau))])


def _moments(values_N: Float32s, shift: float, count: int) -> tuple[float, float]:
    """Mean and unbiased variance of `count` magnitudes less a shift; NaN if nothing can be fitted.

    Zeros may stand among the values where the shift is 0.
    """
    if count < FEW:
        return nan, nan
    from dlrm_hybrid.kernels import magnitudes

    _, total, squares, _ = magnitudes.moments(values_N, shift)
    mean = total / count
    variance = (squares - mean * total) / (count - 1)
    return mean, variance if variance > SAME * mean * mean else nan


def exponential(mean: float, ratio: float) -> float:
    """The distance for an exponential distribution with this mean (SIDCo-E)."""
    return -mean * log(ratio)


def pareto(mean: float, variance: float, ratio: float) -> float:
    """The distance for a generalized Pareto distribution with these moments (SIDCo-P).

    A variance below half the squared mean, which none has for which moments of any order exist that
    the method needs, counts as half of it.
    """
    if not variance > 0:
        return nan
    square = min(mean * mean / variance, 2.0)
    shape, scale = 0.5 * (1 - square), 0.5 * mean * (square + 1)
    if abs(shape) < TINY:
        return -scale * log(ratio)
    return scale * expm1(-shape * log(ratio)) / shape


def gamma(mean: float, mean_log: float, ratio: float, *, is_exact: bool) -> float:
    """The distance for a gamma distribution with these means (SIDCo-GP, first stage).

    Args:
        mean: above 0.
        mean_log: of the natural logarithms.
        ratio: above 0, below 1.
        is_exact: by the inverse of the distribution; otherwise by the paper's closed form, a bound
            that is NaN where it is not positive.
    """
    spread = log(mean) - mean_log
    if not spread > 0:
        return nan
    shape = (3 - spread + sqrt((spread - 3) ** 2 + 24 * spread)) / (12 * spread)
    scale = mean / shape
    if is_exact:
        return scale * _gamma_quantile(shape, ratio)
    closed = -scale * (log(ratio) + lgamma(shape))
    return closed if closed > 0 else nan


def _gamma_quantile(shape: float, ratio: float) -> float:
    """What a part `ratio` of a gamma distribution of scale 1 exceeds."""
    if not isfinite(shape):
        return nan
    import torch

    order = torch.tensor(shape, dtype=torch.float64, device="cpu")

    def exceeding(at: float) -> float:
        return torch.igammac(order, torch.full_like(order, at)).item()

    low, high = 0.0, shape + 1.0
    while exceeding(high) > ratio:
        low, high = high, 2 * high
        if high == inf:
            return nan
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        if not low < middle < high:
            break
        if exceeding(middle) > ratio:
            low = middle
        else:
            high = middle
    return high
