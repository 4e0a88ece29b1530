"""`gradient=none`: dense gradients in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dlrm_hybrid.compress.gradient.methods import GradientKeys, Method, StageContext

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor


def _build(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.compressor import Dense

    return Dense(context.layout)


METHODS = {"none": Method(build=_build, is_sparse=False, precisions=("float32",))}
