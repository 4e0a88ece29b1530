"""`gradient=none`: gradients as they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from dlrm_hybrid.compress.gradient.methods import GradientMethod

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.context import StageContext


@final
@dataclass(frozen=True, kw_only=True)
class NoCompression(GradientMethod):
    """Sends dense gradients in float32."""

    name: ClassVar[str] = "none"
    is_sparse: ClassVar[bool] = False
    sends_all: ClassVar[bool] = True

    @override
    def build(self, context: StageContext) -> Compressor:
        from dlrm_hybrid.compress.gradient.compressor import Dense

        return Dense(context.layout)
