"""The choices of `activation`: what each reads and builds; free of torch when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from dlrm_hybrid.bounds import STRICT, BelowOne, LevelBits, Precision

if TYPE_CHECKING:
    from dlrm_hybrid.compress.activation.codec import ActivationCodec


@dataclass(frozen=True, kw_only=True)
class ActivationKeys:
    """How activations and their gradients travel between stages; see conf/activation/."""

    __pydantic_config__: ClassVar = STRICT

    name: Literal["none", "dct", "sketch", "gradient_topk"]
    sparsity: BelowOne | tuple[BelowOne, ...]
    precision: Precision
    bits: LevelBits | tuple[LevelBits | None, ...] | None
    allow_rice: bool | None
    evaluate_masked: bool
    observe: BelowOne | None

    def sparsity_at(self, cut: int) -> float:
        """Of what crosses this cut, whether one number or a list was given."""
        return self.sparsity[cut] if isinstance(self.sparsity, tuple) else self.sparsity

    def bits_at(self, cut: int) -> int | None:
        """Of the levels that cross this cut; None where these are no levels."""
        return self.bits[cut] if isinstance(self.bits, tuple) else self.bits

    @property
    def sends_levels(self) -> bool:
        """Whether levels cross a cut."""
        bits = self.bits if isinstance(self.bits, tuple) else (self.bits,)
        return any(one is not None for one in bits)


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryContext:
    """The boundary of a worker's stage that a codec is built for.

    Attributes:
        boundary: its number.
        sparsity: of what crosses it.
        sends_gradients: the stage is after it, so gradients are sent and activations received.
        width: of the stage's input.
        rows: of each micro-batch.
        microbatches: of a step.
        seed: of the run.
    """

    boundary: int
    sparsity: float
    sends_gradients: bool
    width: int
    rows: int
    microbatches: int
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A choice of `activation` that compresses.

    Attributes:
        build: the codec of one boundary.
        precisions: of values on the wire.
        compresses_activations: not only their gradients, so evaluations may be compressed too.
    """

    build: Callable[[ActivationKeys, BoundaryContext], ActivationCodec]
    precisions: tuple[str, ...] = ("float32",)
    compresses_activations: bool = True


def _dct(keys: ActivationKeys, context: BoundaryContext) -> ActivationCodec:
    bits = keys.bits_at(context.boundary)
    if bits is not None:
        from dlrm_hybrid.compress.activation.levels import LevelCodec

        return LevelCodec(sparsity=context.sparsity, bits=bits)
    from dlrm_hybrid.compress.activation.dct import ThresholdCodec
    from dlrm_hybrid.wire.section import Dtype

    assert keys.allow_rice is not None
    return ThresholdCodec(
        sparsity=context.sparsity,
        dtype=Dtype[keys.precision.upper()],
        allow_rice=keys.allow_rice,
    )


def _sketch(keys: ActivationKeys, context: BoundaryContext) -> ActivationCodec:
    from dlrm_hybrid.compress.activation.controls import SketchCodec

    return SketchCodec(sparsity=context.sparsity, seed=context.seed)


def _gradient_topk(keys: ActivationKeys, context: BoundaryContext) -> ActivationCodec:
    from dlrm_hybrid.compress.activation.controls import GradientTopKCodec
    from dlrm_hybrid.wire.section import Dtype

    return GradientTopKCodec(
        sparsity=context.sparsity,
        dtype=Dtype[keys.precision.upper()],
        shape=(context.rows, context.width),
        microbatches=context.microbatches if context.sends_gradients else 0,
    )


METHODS: Mapping[str, Method] = {
    "dct": Method(build=_dct, precisions=("float32", "bfloat16", "float16")),
    "sketch": Method(build=_sketch),
    "gradient_topk": Method(build=_gradient_topk, compresses_activations=False),
}
