"""`gradient=deft`: every trainer selects from its own fragments (Yoon and Oh, ICPP 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import STRICT
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Method, StageContext

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DeftSettings:
    """Whether the delegate's budget holds for all, or everyone's own as in the paper."""

    budget: Literal["exact", "paper"]


def _build(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.deft import Deft, partition
    from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
    from dlrm_hybrid.compress.gradient.thresholds.rule import target_k
    from dlrm_hybrid.wire.section import Dtype

    selector = Deft(
        fragments=partition(context.layout.counts, context.trainers),
        k=target_k(context.layout.size, keys.sparsity),
        is_exact=keys.of(DeftSettings).budget == "exact",
        trainer=context.trainer,
        trainers=context.trainers,
    )
    options = FeedbackOptions(dtype=Dtype[keys.precision.upper()])
    return ErrorFeedback(context.layout, selector, options, context.ops)


METHODS = {
    "deft": Method(
        build=_build, sections={"deft": DeftSettings}, rounds=lambda keys: ("leader", "union")
    )
}
