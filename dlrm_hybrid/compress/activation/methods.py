"""The choices of `activation`: what each reads and builds; free of torch when it is loaded."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from typing_extensions import override

from dlrm_hybrid.bounds import BelowOne, LevelBits, WirePrecision
from dlrm_hybrid.record import Choice, Effect, key

if TYPE_CHECKING:
    from dlrm_hybrid.compress.activation.codec import ActivationCodec

_FREE = Effect.FREE
_MASKED = Effect.FREE | Effect.EVALUATION


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundaryContext:
    """The boundary of a worker's stage that a codec is built for.

    Attributes:
        boundary: its number.
        sends_gradients: the stage is after it, so gradients are sent and activations received.
        width: of the stage's input.
        rows: of each micro-batch.
        microbatches: of a step.
        seed: of the run.
    """

    boundary: int
    sends_gradients: bool
    width: int
    rows: int
    microbatches: int
    seed: int


class ActivationMethod(Choice, effect=Effect.STATE):
    """How activations and their gradients travel between stages."""

    compresses_activations: ClassVar[bool] = True
    """Whether activations are compressed, not only their gradients; evaluations then may be too."""
    sparsity: BelowOne | tuple[BelowOne, ...] = 0.0
    bits: LevelBits | tuple[LevelBits | None, ...] | None = None
    evaluate_masked: bool

    @abstractmethod
    def build(self, context: BoundaryContext) -> ActivationCodec:
        """The codec of one boundary."""

    def sparsity_at(self, cut: int) -> float:
        """The sparsity of what crosses this cut, whether the setting is one number or a list."""
        return self.sparsity[cut] if isinstance(self.sparsity, tuple) else self.sparsity

    def bits_at(self, cut: int) -> int | None:
        """Bits of the levels that cross this cut; None where no levels do."""
        return self.bits[cut] if isinstance(self.bits, tuple) else self.bits

    @property
    def sends_levels(self) -> bool:
        """Whether levels cross a cut."""
        bits = self.bits if isinstance(self.bits, tuple) else (self.bits,)
        return any(b is not None for b in bits)


@dataclass(frozen=True, kw_only=True)
class Dense(ActivationMethod):
    """Dense activations and gradients in float32."""

    name: ClassVar[str] = "none"
    compresses_activations: ClassVar[bool] = False
    evaluate_masked: bool = key(True, "no effect here", _MASKED)
    observe: BelowOne | None = key(
        None, "record the threshold that this sparsity would need", _FREE, only="parallel.cuts"
    )

    @override
    def build(self, context: BoundaryContext) -> ActivationCodec:
        from dlrm_hybrid.compress.activation.codec import DenseCodec

        return DenseCodec(self.observe)


@dataclass(frozen=True, kw_only=True)
class Dct(ActivationMethod):
    """DCT-MP (Gupta et al., KDD 2021): the largest elements of each row, both ways on one mask."""

    name: ClassVar[str] = "dct"
    sparsity: BelowOne | tuple[BelowOne, ...] = key(
        0.90, "fraction of each row dropped; or a list, one for each cut"
    )
    precision: WirePrecision = key("float32", "type of values on the wire, where bits is null")
    bits: LevelBits | tuple[LevelBits | None, ...] | None = key(
        None,
        "3 to 8: values as integer levels of so many bits, entropy-coded, and so are positions; or "
        "a list",
    )
    allow_rice: bool = key(
        True,
        "Rice-code positions where smaller; costs 20 µs a batch; no effect with bits",
        _FREE,
    )
    evaluate_masked: bool = key(True, "compress in evaluations too", _MASKED)

    @override
    def build(self, context: BoundaryContext) -> ActivationCodec:
        sparsity, bits = self.sparsity_at(context.boundary), self.bits_at(context.boundary)
        if bits is not None:
            from dlrm_hybrid.compress.activation.levels import LevelCodec

            return LevelCodec(sparsity=sparsity, bits=bits)
        from dlrm_hybrid.compress.activation.dct import ThresholdCodec
        from dlrm_hybrid.wire.section import Dtype

        dtype = Dtype[self.precision.upper()]
        return ThresholdCodec(sparsity=sparsity, dtype=dtype, allow_rice=self.allow_rice)


@dataclass(frozen=True, kw_only=True)
class Sketch(ActivationMethod):
    """Negative control: activations projected by a random matrix and back; gradients are dense."""

    name: ClassVar[str] = "sketch"
    sparsity: BelowOne | tuple[BelowOne, ...] = key(
        0.50, "fraction of columns dropped by the projection; or a list, one for each cut"
    )
    evaluate_masked: bool = key(True, "compress in evaluations too", _MASKED)

    @override
    def build(self, context: BoundaryContext) -> ActivationCodec:
        from dlrm_hybrid.compress.activation.controls import SketchCodec

        return SketchCodec(sparsity=self.sparsity_at(context.boundary), seed=context.seed)


@dataclass(frozen=True, kw_only=True)
class GradientTopK(ActivationMethod):
    """Negative control: top-k of each activation gradient, with error feedback by position."""

    name: ClassVar[str] = "gradient_topk"
    compresses_activations: ClassVar[bool] = False
    sparsity: BelowOne | tuple[BelowOne, ...] = key(
        0.50, "fraction of each matrix held back; or a list, one for each cut"
    )
    evaluate_masked: bool = key(True, "no effect here: the forward pass is not compressed", _MASKED)

    @override
    def build(self, context: BoundaryContext) -> ActivationCodec:
        from dlrm_hybrid.compress.activation.controls import GradientTopKCodec
        from dlrm_hybrid.wire.section import Dtype

        return GradientTopKCodec(
            sparsity=self.sparsity_at(context.boundary),
            dtype=Dtype.FLOAT32,
            shape=(context.rows, context.width),
            microbatches=context.microbatches if context.sends_gradients else 0,
        )
