"""`gradient=deft`: each trainer selects from its own fragments, and all send the union."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

from typing_extensions import override

from dlrm_hybrid.bounds import Part, PrecisionOrLevels
from dlrm_hybrid.compress.gradient.methods import GradientMethod, dtype_of

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.context import StageContext


@final
@dataclass(frozen=True, kw_only=True)
class Deft(GradientMethod):
    """DEFT: trainers select from disjoint fragments and send the union (Yoon, Oh, ICPP 2023).

    Attributes:
        density: fraction of all elements that is sent; the rest stays in a residual.
        precision: type of the values sent; "levels" are integer multiples of a quantum.
        budget: exactly k elements in total, or about k, as in the paper.
    """

    name: ClassVar[str] = "deft"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    budget: Literal["exact", "paper"] = "exact"

    @override
    def rounds(self) -> tuple[str, ...]:
        return ("leader", "union")

    @override
    def build(self, context: StageContext) -> Compressor:
        from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
        from dlrm_hybrid.compress.gradient.fragments import FragmentSelector, partition
        from dlrm_hybrid.compress.gradient.rule import target_k

        selector = FragmentSelector(
            fragments=partition(context.layout.counts, context.trainers),
            k=target_k(context.layout.size, 1 - self.density),
            is_exact=self.budget == "exact",
            trainer=context.trainer,
            trainers=context.trainers,
        )
        options = FeedbackOptions(dtype=dtype_of(self.precision), levels=self.levels)
        return ErrorFeedback(context.layout, selector, options)
