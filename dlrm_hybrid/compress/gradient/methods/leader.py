"""`gradient=cltk` and `gradient=deft`: in turn, one trainer decides what all of them send.

ScaleCom's CLT-k (Chen et al., NeurIPS 2020) and DEFT (Yoon and Oh, ICPP 2023).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dlrm_hybrid.bounds import STRICT, Part
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Method, StageContext

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor


@dataclass(frozen=True, kw_only=True)
class CltkSettings:
    """Settings of `gradient=cltk`: the low-pass filter of ScaleCom; 1 is plain error feedback."""

    __pydantic_config__: ClassVar = STRICT

    low_pass: Part


@dataclass(frozen=True, kw_only=True)
class DeftSettings:
    """Settings of `gradient=deft`: the leader's budget, or each trainer's own as published."""

    __pydantic_config__: ClassVar = STRICT

    budget: Literal["exact", "paper"]


def _cltk(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
    from dlrm_hybrid.compress.gradient.selector import FromLeader, TopK
    from dlrm_hybrid.compress.gradient.thresholds.rule import target_k

    largest = TopK(target_k(context.layout.size, keys.sparsity))
    selector = FromLeader(inner=largest, trainer=context.trainer, trainers=context.trainers)
    low_pass = keys.of(CltkSettings).low_pass
    options = FeedbackOptions(dtype=keys.dtype, low_pass=low_pass, levels=keys.levels)
    return ErrorFeedback(context.layout, selector, options, context.ops)


def _deft(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.deft import Deft, partition
    from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
    from dlrm_hybrid.compress.gradient.thresholds.rule import target_k

    selector = Deft(
        fragments=partition(context.layout.counts, context.trainers),
        k=target_k(context.layout.size, keys.sparsity),
        is_exact=keys.of(DeftSettings).budget == "exact",
        trainer=context.trainer,
        trainers=context.trainers,
    )
    options = FeedbackOptions(dtype=keys.dtype, levels=keys.levels)
    return ErrorFeedback(context.layout, selector, options, context.ops)


METHODS = {
    "cltk": Method(build=_cltk, sections={"cltk": CltkSettings}, rounds=lambda keys: ("leader",)),
    "deft": Method(
        build=_deft, sections={"deft": DeftSettings}, rounds=lambda keys: ("leader", "union")
    ),
}
