"""From the configuration to what compresses gradients; imports torch, for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlrm_hybrid.compress.gradient.compressor import GradientCompressor
from dlrm_hybrid.compress.gradient.dense import NoCompression
from dlrm_hybrid.compress.gradient.drain import Drain, DrainMode
from dlrm_hybrid.compress.gradient.lifespan import LifeSpan, Renewal
from dlrm_hybrid.compress.gradient.sparsifier import Sparsifier, SparsifierOptions
from dlrm_hybrid.compress.gradient.thresholds.exact import Exact
from dlrm_hybrid.compress.gradient.thresholds.hard import Hard, usual_magnitude
from dlrm_hybrid.compress.gradient.thresholds.histogram import Histogram
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule, keep_count
from dlrm_hybrid.config.build_compress import dtype
from dlrm_hybrid.config.build_coordination import COMPRESSORS
from dlrm_hybrid.config.compression_schema import GradientConfig
from dlrm_hybrid.config.gradient_holder import Holder
from dlrm_hybrid.config.schema import Config


def gradients(config: Config, holder: Holder) -> GradientCompressor:
    """What a trainer's worker makes of its gradients."""
    return METHODS[config.gradient.name](config, holder)


def _none(config: Config, holder: Holder) -> GradientCompressor:
    return NoCompression(holder.specs)


def _sparsifier(config: Config, holder: Holder) -> GradientCompressor:
    return Sparsifier(holder.specs, _options(config, holder))


def _options(config: Config, holder: Holder) -> SparsifierOptions:
    options = config.gradient
    assert options.threshold is not None and options.drain_every is not None
    assert options.lifespan is not None and options.staggered is not None
    return SparsifierOptions(
        sparsity=options.sparsity,
        rule=RULES[options.threshold](options, holder),
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
            trainer=holder.trainer,
        ),
        scale=holder.lr if options.residual == "update" else None,
    )


def _exact(options: GradientConfig, holder: Holder) -> ThresholdRule:
    return Exact()


def _histogram(options: GradientConfig, holder: Holder) -> ThresholdRule:
    return Histogram()


def _hard(options: GradientConfig, holder: Holder) -> ThresholdRule:
    assert options.hard is not None
    keep = keep_count(holder.model_elements, options.sparsity)
    return Hard(options.hard.magnitude or usual_magnitude(keep))


RULES: Mapping[str, Callable[[GradientConfig, Holder], ThresholdRule]] = {
    "exact": _exact,
    "histogram": _histogram,
    "hard": _hard,
}
METHODS: Mapping[str, Callable[[Config, Holder], GradientCompressor]] = {
    "none": _none,
    "dct": _sparsifier,
    "topk": _sparsifier,
    "hard": _sparsifier,
    **COMPRESSORS,
}
