"""From the configuration to what compresses activations; imports torch, for the ranks."""

from __future__ import annotations

from dlrm_hybrid.compress.activation.codec import ActivationCodec
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.compress.activation.dense import DenseCodec
from dlrm_hybrid.compress.activation.gradient_topk import GradientTopKCodec
from dlrm_hybrid.compress.activation.observed import ObservedCodec
from dlrm_hybrid.compress.activation.per_boundary import PerBoundaryCodec
from dlrm_hybrid.compress.activation.sketch import SketchCodec
from dlrm_hybrid.config.rules import sparsity_per_cut
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.spec import StagePart, microbatch_rows
from dlrm_hybrid.wire.section import Dtype

DTYPES = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.FLOAT16}


def dtype(precision: str) -> Dtype:
    """The type of values on the wire."""
    return DTYPES[precision]


def activations(config: Config, part: StagePart) -> ActivationCodec:
    """What the worker of a stage sends over its boundaries, and makes of what it receives."""
    options = config.activation
    if options.name == "none":
        return DenseCodec() if options.observe is None else ObservedCodec(options.observe)
    sparsities = sparsity_per_cut(config)
    boundaries = [b for b in (part.index - 1, part.index) if 0 <= b < len(sparsities)]
    return PerBoundaryCodec({b: _activations(config, part, b, sparsities[b]) for b in boundaries})


def evaluation_activations(config: Config, part: StagePart) -> ActivationCodec:
    """The same in evaluations, where no gradient is sent."""
    options = config.activation
    if options.name in ("none", "gradient_topk") or not options.evaluate_masked:
        return DenseCodec()
    return activations(config, part)


def _activations(
    config: Config, part: StagePart, boundary: int, sparsity: float
) -> ActivationCodec:
    options = config.activation
    if options.name == "dct":
        assert options.allow_rice is not None
        return ThresholdCodec(
            sparsity=sparsity, dtype=dtype(options.precision), allow_rice=options.allow_rice
        )
    if options.name == "sketch":
        return SketchCodec(sparsity=sparsity, seed=config.train.seed)
    microbatches = config.schedule.microbatches
    sends_gradients = boundary == part.index - 1
    return GradientTopKCodec(
        sparsity=sparsity,
        dtype=dtype(options.precision),
        widths={boundary: part.input_width} if sends_gradients else {},
        rows=microbatch_rows(config.train.batch_size, microbatches),
        microbatches=microbatches,
    )
