"""`gradient=cltk`: one trainer selects for all (Chen et al., ScaleCom, NeurIPS 2020)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import STRICT, Part
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Method, StageContext

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CltkSettings:
    """The low-pass filter of ScaleCom; 1 is plain error feedback."""

    low_pass: Part


def _build(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
    from dlrm_hybrid.compress.gradient.selector import FromLeader, TopK
    from dlrm_hybrid.compress.gradient.thresholds.rule import target_k
    from dlrm_hybrid.wire.section import Dtype

    largest = TopK(target_k(context.layout.size, keys.sparsity))
    selector = FromLeader(inner=largest, trainer=context.trainer, trainers=context.trainers)
    options = FeedbackOptions(
        dtype=Dtype[keys.precision.upper()], low_pass=keys.of(CltkSettings).low_pass
    )
    return ErrorFeedback(context.layout, selector, options, context.ops)


METHODS = {
    "cltk": Method(build=_build, sections={"cltk": CltkSettings}, rounds=lambda keys: ("leader",))
}
