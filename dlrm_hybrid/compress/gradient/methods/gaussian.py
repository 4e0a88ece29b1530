"""`gradient=gaussian`: the threshold that a normal distribution would have.

It begins with a guess from moments and takes a few looks at how many elements exceed it. What it
ends with may be far off.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite, sqrt
from statistics import NormalDist
from typing import TYPE_CHECKING, ClassVar, Literal, final

from typing_extensions import override

from dlrm_hybrid.compress.gradient.methods.thresholded import Thresholded
from dlrm_hybrid.compress.gradient.rule import OwnFinder, above

if TYPE_CHECKING:
    from dlrm_hybrid.arrays import Float32s
    from dlrm_hybrid.compress.gradient.rule import RuleState

LOOKS = 3
LOWER, HIGHER = 0.5, 1.5


@final
@dataclass(frozen=True, kw_only=True)
class Gaussian(Thresholded, OwnFinder):
    """Gaussian-k: a threshold from a fitted normal distribution (Shi et al., 2019).

    It is halved where less than ⅔ of what is wanted exceeds it, times 1.5 where more than 4/3.
    Where no element exceeds it, the largest is sent.

    Attributes:
        fit: to signed values, as its authors do, or to magnitudes, as in SIDCo's comparison.
    """

    name: ClassVar[str] = "gaussian"
    fit: Literal["signed", "magnitude"] = "signed"

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        from dlrm_hybrid.kernels import magnitudes

        moments = magnitudes.moments(x_N, 0.0)
        total = moments.total if self.fit == "signed" else moments.excess
        mean = total / x_N.size
        variance = max(0.0, moments.squares - mean * total) / max(1, x_N.size - 1)
        quantile = NormalDist().inv_cdf(1 - k / x_N.size / 2)
        tau = max(0.0, mean + quantile * sqrt(variance)) if isfinite(variance) else 0.0
        count = 0
        for look in range(LOOKS):
            count = magnitudes.reaching(x_N, above(tau)).size
            if 2 * k <= 3 * count <= 4 * k or look == LOOKS - 1:
                break
            tau *= LOWER if 3 * count < 2 * k else HIGHER
        return above(tau) if count > 0 else magnitudes.kth_magnitude(x_N, 1)
