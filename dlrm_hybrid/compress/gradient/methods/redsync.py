"""`gradient=redsync`: a threshold between the mean and the largest magnitude.

It takes a few looks at how many elements exceed a guess. What it ends with may be far off.

Shapes: N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

from typing_extensions import override

from dlrm_hybrid.compress.gradient.methods.thresholded import Thresholded
from dlrm_hybrid.compress.gradient.rule import OwnFinder, above

if TYPE_CHECKING:
    from dlrm_hybrid.arrays import Float32s
    from dlrm_hybrid.compress.gradient.rule import RuleState

NEAR = 0.2  # the bisection ends at an interval of this length, so after three looks
TRIMMED = (0.8, 0.6, 0.4, 0.2, 0.0)
Look = Callable[[float], tuple[float, int]]
"""The threshold at a part of the way from mean to maximum, and how many elements reach it."""


@final
@dataclass(frozen=True, kw_only=True)
class RedSync(Thresholded, OwnFinder):
    """RedSync: searches between mean and maximum magnitude for a threshold (Fang et al., 2019).

    Where no element exceeds it, as where all magnitudes are equal, it is that of exactly `k`.

    Attributes:
        search: bisect between mean and maximum, or step down from the maximum ("trim").
    """

    name: ClassVar[str] = "redsync"
    search: Literal["bisect", "trim"] = "bisect"

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        from dlrm_hybrid.kernels import magnitudes

        moments = magnitudes.moments(x_N, 0.0)
        mean = moments.excess / x_N.size

        def look(part: float) -> tuple[float, int]:
            tau = above(mean + part * (moments.largest - mean))
            return tau, magnitudes.reaching(x_N, tau).size

        looks = _bisected(look, k) if self.search == "bisect" else _trimmed(look, k)
        *_, (tau, count) = looks
        return tau if count > 0 else magnitudes.kth_magnitude(x_N, k)


def _bisected(look: Look, k: int) -> Iterator[tuple[float, int]]:
    low, high = 0.0, 1.0
    while high - low > NEAR:
        part = (low + high) / 2
        tau, count = look(part)
        yield tau, count
        if k < count < 2 * k:
            return
        low, high = (low, part) if 2 * count < k else (part, high)


def _trimmed(look: Look, k: int) -> Iterator[tuple[float, int]]:
    for part in TRIMMED:
        tau, count = look(part)
        yield tau, count
        if count >= k:
            return
