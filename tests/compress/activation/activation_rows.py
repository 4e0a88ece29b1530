"""Every codec of activations: a row per codec and option that matters."""

from collections.abc import Callable
from dataclasses import dataclass

from dlrm_hybrid.compress.activation.codec import ActivationCodec, DenseCodec
from dlrm_hybrid.compress.activation.controls import GradientTopKCodec, SketchCodec
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.compress.activation.levels import LevelCodec
from dlrm_hybrid.wire.section import Dtype

Make = Callable[[int, int], ActivationCodec]
"""(rows, width) of what is sent over boundary 1 in micro-batch 2."""


@dataclass(frozen=True)
class CodecRow:
    """A codec, and what may be asked of it.

    Attributes:
        make: a fresh one.
        linear: backward is the transpose of forward, the mask held still.
        relative_error: of what rounding on the wire may do to a number.
        stateful: something lasts from step to step.
    """

    make: Make
    linear: bool = True
    relative_error: float = 0.0
    stateful: bool = False


def _threshold(sparsity: float, dtype: Dtype, allow_rice: bool = False) -> Make:
    return lambda rows, width: ThresholdCodec(sparsity=sparsity, dtype=dtype, allow_rice=allow_rice)


def _gradient_topk(dtype: Dtype) -> Make:
    return lambda rows, width: GradientTopKCodec(
        sparsity=0.75, dtype=dtype, shape=(rows, width), microbatches=3
    )


def _levels(sparsity: float, bits: int) -> Make:
    return lambda rows, width: LevelCodec(sparsity=sparsity, bits=bits)


CODECS = {
    "dense": CodecRow(lambda rows, width: DenseCodec()),
    "observed": CodecRow(lambda rows, width: DenseCodec(observe=0.9)),
    "sketch": CodecRow(lambda rows, width: SketchCodec(sparsity=0.5, seed=3), relative_error=1e-5),
    "threshold_0": CodecRow(_threshold(0.0, Dtype.FLOAT32)),
    "threshold_75": CodecRow(_threshold(0.75, Dtype.FLOAT32)),
    "threshold_90_rice": CodecRow(_threshold(0.9, Dtype.FLOAT32, allow_rice=True)),
    "threshold_90_bfloat16": CodecRow(_threshold(0.9, Dtype.BFLOAT16), relative_error=2**-8),
    "threshold_90_float16": CodecRow(_threshold(0.9, Dtype.FLOAT16), relative_error=2**-10),
    "levels_0_8": CodecRow(_levels(0.0, 8), relative_error=0.05),
    "levels_75_5": CodecRow(_levels(0.75, 5), relative_error=0.2),
    "levels_90_4": CodecRow(_levels(0.9, 4), relative_error=0.3),
    "levels_90_3": CodecRow(_levels(0.9, 3), relative_error=0.5),
    "gradient_topk": CodecRow(_gradient_topk(Dtype.FLOAT32), linear=False, stateful=True),
    "gradient_topk_bfloat16": CodecRow(
        _gradient_topk(Dtype.BFLOAT16), linear=False, relative_error=2**-8, stateful=True
    ),
}
