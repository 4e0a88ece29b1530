"""`gradient=hard`: one magnitude for all tensors and steps."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from dlrm_hybrid.bounds import Positive, Rate
from dlrm_hybrid.compress.gradient.methods.thresholded import Thresholded
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder, ThresholdRule, target_k

if TYPE_CHECKING:
    from dlrm_hybrid.arrays import Float32s
    from dlrm_hybrid.compress.gradient.context import StageContext
    from dlrm_hybrid.compress.gradient.rule import RuleState


@final
@dataclass(frozen=True, kw_only=True)
class Hard(Thresholded, ThresholdRule):
    """Hard threshold: one constant for all tensors and steps (Sahu et al., NeurIPS 2021).

    How many elements reach it is left to chance.

    Attributes:
        magnitude: the threshold; None for 1 / (2 sqrt(k)), with k = density times all elements.
    """

    name: ClassVar[str] = "hard"
    lifespan: Positive = 1_000_000_000
    magnitude: Rate | None = None

    @override
    def finder(self, context: StageContext) -> ThresholdFinder:
        k = target_k(context.model_elements, 1 - self.density)
        return FixedThreshold(self.magnitude or 1 / (2 * sqrt(k)))


@final
@dataclass(frozen=True, slots=True)
class FixedThreshold(ThresholdFinder):
    """The same magnitude, above 0, whatever the values."""

    magnitude: float

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        return self.magnitude
