"""`gradient=none` and `gradient=terngrad`: every element is sent, in float32 or as -1, 0 or 1.

TernGrad (Wen et al., NIPS 2017) multiplies them by a scale and is right on average.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dlrm_hybrid.bounds import STRICT, Positive, Rate
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Method, StageContext, module_of

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor


@dataclass(frozen=True, kw_only=True)
class TernGradSettings:
    """Settings of `gradient=terngrad`; see conf/gradient/base/sections.yaml.

    Attributes:
        clip: standard deviations at which gradients are clipped; None for nowhere.
        sharing: the largest scale of all trainers serves all.
        encoding: two bits an element, or five elements a byte.
        smallest: tensors of fewer elements stay float32.
        pull: servers report the few levels of the mean, or dense weights.
    """

    __pydantic_config__: ClassVar = STRICT

    clip: Rate | None
    sharing: bool
    encoding: Literal["bits", "trits"]
    smallest: Positive
    pull: Literal["levels", "weights"]


def _dense(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.compressor import Dense

    return Dense(context.layout)


def _terngrad(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.terngrad import TernGrad

    return TernGrad(
        context.layout,
        keys.of(TernGradSettings),
        exempt=[
            spec.name for spec in context.layout.specs if module_of(spec.name) == context.last_layer
        ],
        seed=context.seed,
        trainer=context.trainer,
        ops=context.ops,
    )


def _rounds(keys: GradientKeys) -> tuple[str, ...]:
    return ("max",) if keys.of(TernGradSettings).sharing else ()


def _faults(keys: GradientKeys) -> Iterator[str]:
    terngrad = keys.of(TernGradSettings)
    if terngrad.pull == "levels" and not terngrad.sharing:
        yield (
            "gradient.terngrad.sharing = False: sums of different scales have no common levels; "
            "needs gradient.terngrad.pull=weights"
        )


METHODS = {
    "none": Method(build=_dense, is_sparse=False, precisions=("float32",)),
    "terngrad": Method(
        build=_terngrad,
        sections={"terngrad": TernGradSettings},
        is_sparse=False,
        precisions=("float32",),
        rounds=_rounds,
        faults=_faults,
    ),
}
