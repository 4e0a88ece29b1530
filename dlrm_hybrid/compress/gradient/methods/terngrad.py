"""`gradient=terngrad`: -1, 0 or 1 times a scale, right on average."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

from typing_extensions import override

from dlrm_hybrid.bounds import Positive, Rate
from dlrm_hybrid.compress.gradient.context import module_of
from dlrm_hybrid.compress.gradient.methods import GradientMethod

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.context import StageContext


@final
@dataclass(frozen=True, kw_only=True)
class TernGrad(GradientMethod):
    """TernGrad: rounds to -1, 0 or 1 times a scale, without bias (Wen et al., NIPS 2017).

    Attributes:
        clip: gradients are clipped at this many standard deviations; None turns clipping off.
        sharing: whether all trainers use the largest of their scales.
        encoding: two bits per element, or five elements per byte ("trits").
        smallest: tensors with fewer elements are sent in float32, and so is the last layer.
        pull: what a world's servers send back; None is "levels" with shared scales, else "weights".
    """

    name: ClassVar[str] = "terngrad"
    is_sparse: ClassVar[bool] = False
    leaves_last_layer: ClassVar[bool] = True
    alone: ClassVar[str] = "sharing=false"
    clip: Rate | None = 2.5
    sharing: bool = True
    encoding: Literal["bits", "trits"] = "bits"
    smallest: Positive = 256
    pull: Literal["levels", "weights"] | None = None

    @property
    @override
    def publishes_means(self) -> bool:
        return self.sharing if self.pull is None else self.pull == "levels"

    @override
    def rounds(self) -> tuple[str, ...]:
        return ("max",) if self.sharing else ()

    @override
    def faults(self) -> Iterator[tuple[str, str]]:
        if self.pull == "levels" and not self.sharing:
            yield "sharing", "sums of different scales have no common levels; needs pull=weights"

    @override
    def build(self, context: StageContext) -> Compressor:
        from dlrm_hybrid.compress.gradient.ternary import TernaryCompressor

        return TernaryCompressor(
            context.layout,
            [
                spec
                for spec in context.layout.specs
                if spec.count >= self.smallest and module_of(spec.name) != context.last_layer
            ],
            clip=self.clip,
            sharing=self.sharing,
            encoding=self.encoding,
            seed=context.seed,
            trainer=context.trainer,
        )
