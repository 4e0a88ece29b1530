"""How far the magnitudes above a threshold reach, by a distribution fitted to them (SIDCo, 2).

Each takes moments of what exceeds a threshold and gives the distance above it that a part `ratio`
of them exceeds. NaN where nothing can be fitted.
"""

from __future__ import annotations

from math import expm1, inf, isfinite, lgamma, log, nan, sqrt

import torch

TINY = 1e-6
STEPS = 80  # of a bisection in float64


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
