"""From the configuration to what compresses gradients; imports torch, for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dlrm_hybrid.compress.gradient.aim import Aim, Scope
from dlrm_hybrid.compress.gradient.compressor import GradientCompressor
from dlrm_hybrid.compress.gradient.correction import CorrectionOptions, MomentumCorrection
from dlrm_hybrid.compress.gradient.dense import NoCompression
from dlrm_hybrid.compress.gradient.drain import Drain, DrainMode
from dlrm_hybrid.compress.gradient.lifespan import LifeSpan, Renewal
from dlrm_hybrid.compress.gradient.sparsifier import Sparsifier, SparsifierOptions
from dlrm_hybrid.config.build_compress import dtype
from dlrm_hybrid.config.build_threshold import THRESHOLDS
from dlrm_hybrid.config.compression_schema import GradientConfig
from dlrm_hybrid.config.gradient_holder import Holder
from dlrm_hybrid.config.schema import Config


def gradients(config: Config, holder: Holder) -> GradientCompressor:
    """What a trainer's worker makes of its gradients, if it decides alone."""
    return METHODS[config.gradient.name](config, holder)


def _none(config: Config, holder: Holder) -> GradientCompressor:
    return NoCompression(holder.specs)


def _sparsifier(config: Config, holder: Holder) -> GradientCompressor:
    return Sparsifier(holder.specs, _options(config, holder))


def _dgc(config: Config, holder: Holder) -> GradientCompressor:
    options = config.gradient.correction
    assert options is not None
    correction = CorrectionOptions(
        momentum=options.momentum,
        nesterov=options.nesterov,
        masking=options.masking,
        clip_norm=options.clip_norm,
        trainers=config.parallel.trainers,
    )
    return MomentumCorrection(Sparsifier(holder.specs, _options(config, holder)), correction)


def _options(config: Config, holder: Holder) -> SparsifierOptions:
    options = config.gradient
    assert options.threshold is not None and options.drain_every is not None
    assert options.lifespan is not None and options.staggered is not None
    return SparsifierOptions(
        aim=_aim(options),
        rule=THRESHOLDS[options.threshold](config, holder),
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


def _aim(options: GradientConfig) -> Aim:
    warm = options.correction
    return Aim(
        sparsity=options.sparsity,
        scope=Scope(options.scope),
        sends_ties=options.name != "topk",
        warmup_sparsities=warm.warmup_sparsities if warm is not None else (),
        warmup_steps=warm.warmup_steps if warm is not None else 0,
    )


METHODS: Mapping[str, Callable[[Config, Holder], GradientCompressor]] = {
    "none": _none,
    "dct": _sparsifier,
    "topk": _sparsifier,
    "dgc": _dgc,
    "redsync": _sparsifier,
    "gaussian": _sparsifier,
    "hard": _sparsifier,
    "sidco": _sparsifier,
}
