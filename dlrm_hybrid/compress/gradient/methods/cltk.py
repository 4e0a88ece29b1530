"""`gradient=cltk`: one trainer in turn decides what all of them send."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from dlrm_hybrid.bounds import Part, PrecisionOrLevels
from dlrm_hybrid.compress.gradient.methods import GradientMethod, dtype_of

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.context import StageContext


@final
@dataclass(frozen=True, kw_only=True)
class CltK(GradientMethod):
    """CLT-k: one trainer in turn selects for all (Chen et al., ScaleCom, NeurIPS 2020).

    Attributes:
        density: fraction of all elements that is sent; the rest stays in a residual.
        precision: type of the values sent; "levels" are integer multiples of a quantum.
        low_pass: weight of new gradients in the residual; the paper uses 0.1 at high rates.
    """

    name: ClassVar[str] = "cltk"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    low_pass: Part = 1.0

    @override
    def rounds(self) -> tuple[str, ...]:
        return ("leader",)

    @override
    def build(self, context: StageContext) -> Compressor:
        from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
        from dlrm_hybrid.compress.gradient.rule import target_k
        from dlrm_hybrid.compress.gradient.selector import FromLeader, LargestOfAll

        largest = LargestOfAll(target_k(context.layout.size, 1 - self.density))
        selector = FromLeader(inner=largest, trainer=context.trainer, trainers=context.trainers)
        options = FeedbackOptions(
            dtype=dtype_of(self.precision), low_pass=self.low_pass, levels=self.levels
        )
        return ErrorFeedback(context.layout, selector, options)
