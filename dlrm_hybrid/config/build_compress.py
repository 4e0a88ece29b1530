"""From the configuration to what compresses; imports torch, for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from dlrm_hybrid.compress.activation.codec import ActivationCodec
from dlrm_hybrid.compress.activation.dct import ThresholdCodec
from dlrm_hybrid.compress.activation.dense import DenseCodec
from dlrm_hybrid.compress.activation.gradient_topk import GradientTopKCodec
from dlrm_hybrid.compress.activation.observed import ObservedCodec
from dlrm_hybrid.compress.activation.per_boundary import PerBoundaryCodec
from dlrm_hybrid.compress.activation.sketch import SketchCodec
from dlrm_hybrid.compress.gradient.compressor import GradientCompressor, Spec
from dlrm_hybrid.compress.gradient.dense import NoCompression
from dlrm_hybrid.compress.gradient.drain import Drain, DrainMode
from dlrm_hybrid.compress.gradient.lifespan import LifeSpan, Renewal
from dlrm_hybrid.compress.gradient.sparsifier import Sparsifier, SparsifierOptions
from dlrm_hybrid.compress.gradient.thresholds.exact import Exact
from dlrm_hybrid.compress.gradient.thresholds.histogram import Histogram
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
from dlrm_hybrid.config.compression_rules import sparsity_per_cut
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.partition import StagePart, microbatch_rows
from dlrm_hybrid.wire.section import Dtype

DTYPES = {"float32": Dtype.FLOAT32, "bfloat16": Dtype.BFLOAT16, "float16": Dtype.FLOAT16}
RULES: Mapping[str, Callable[[], ThresholdRule]] = {"exact": Exact, "histogram": Histogram}


def dtype(precision: str) -> Dtype:
    """The type of values on the wire."""
    return DTYPES[precision]


def gradients(
    config: Config, specs: Sequence[Spec], trainer: int, lr: Callable[[int], float]
) -> GradientCompressor:
    """What a trainer's worker makes of its gradients.

    Args:
        config: of the run.
        specs: the tensors of the worker's stage.
        trainer: its number.
        lr: learning rate by step.
    """
    options = config.gradient
    if options.name == "none":
        return NoCompression(specs)
    assert options.threshold is not None and options.drain_every is not None
    assert options.lifespan is not None and options.staggered is not None
    return Sparsifier(
        specs,
        SparsifierOptions(
            sparsity=options.sparsity,
            rule=RULES[options.threshold](),
            lifespan=LifeSpan(
                steps=options.lifespan,
                renewal=Renewal(options.renewal),
                staggered=options.staggered,
            ),
            dtype=dtype(options.precision),
            drain=Drain(
                mode=DrainMode(options.drain),
                every=options.drain_every,
                seed=config.train.seed,
                trainer=trainer,
            ),
            scale=lr if options.residual == "update" else None,
        ),
    )


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
