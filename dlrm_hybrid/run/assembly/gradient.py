"""From the configuration to what compresses gradients; imports torch, for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.compressor import Compressor, Dense
from dlrm_hybrid.compress.gradient.deft import Deft
from dlrm_hybrid.compress.gradient.deft_plan import partition
from dlrm_hybrid.compress.gradient.error_feedback import (
    Drain,
    DrainMode,
    ErrorFeedback,
    FeedbackOptions,
)
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.selector import FromLeader, Selector, TopK, Union
from dlrm_hybrid.compress.gradient.target import Mode, Renewal, Scope, SparsityTarget
from dlrm_hybrid.compress.gradient.terngrad import TernGrad, TernGradOptions
from dlrm_hybrid.compress.gradient.thresholded import Thresholded
from dlrm_hybrid.compress.gradient.thresholds.rule import keep_count
from dlrm_hybrid.compress.gradient.transforms import Clip, Momentum, Scale, Transform
from dlrm_hybrid.config.compression_schema import GradientConfig
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.run.assembly.activations import dtype
from dlrm_hybrid.run.assembly.thresholds import THRESHOLDS, Holder
from dlrm_hybrid.wire.section import Encoding

AGGREGATIONS = {"union": (Op.UNION,), "leader": (Op.LEADER,)}
CODES = {"bits": Encoding.TERNARY, "trits": Encoding.TRITS}


@dataclass(frozen=True, slots=True)
class Method:
    """What a choice of `gradient` builds.

    Attributes:
        make: a compressor of one trainer.
        rounds: in which its trainers agree at each step.
    """

    make: Callable[[Config, Holder], Compressor]
    rounds: tuple[Op, ...] = ()


def compressor(config: Config, holder: Holder) -> Compressor:
    """What a trainer's worker makes of its gradients."""
    return METHODS[config.gradient.name].make(config, holder)


def rounds(config: Config) -> tuple[Op, ...]:
    """Those of the compressor: a server must know them too."""
    gradient = config.gradient
    if gradient.terngrad is not None and not gradient.terngrad.sharing:
        return ()
    shared = AGGREGATIONS.get(gradient.aggregation or "own", ())
    return shared or METHODS[gradient.name].rounds


def tells_levels(config: Config) -> bool:
    """Whether servers tell means of ternary gradients, from which replicas learn."""
    terngrad = config.gradient.terngrad
    return terngrad is not None and terngrad.pull == "levels"


def _none(config: Config, holder: Holder) -> Compressor:
    return Dense(holder.layout)


def _thresholded(config: Config, holder: Holder) -> Compressor:
    options = config.gradient
    assert options.threshold is not None and options.drain_every is not None
    assert options.lifespan is not None and options.staggered is not None
    selector: Selector[Any] = Thresholded(
        target=_target(options),
        rule=THRESHOLDS[options.threshold](config, holder),
        renewal=Renewal(
            steps=options.lifespan, mode=Mode(options.renewal), staggered=options.staggered
        ),
    )
    if options.aggregation == "union":
        selector = Union(selector, dtype(options.precision))
    elif options.aggregation == "leader":
        selector = _led(config, holder, selector)
    drain = Drain(
        mode=DrainMode(options.drain),
        every=options.drain_every,
        seed=config.train.seed,
        trainer=holder.trainer,
    )
    transforms = _transforms(config, holder)
    return _feedback(config, holder.layout, selector, transforms=transforms, drain=drain)


def _target(options: GradientConfig) -> SparsityTarget:
    warm = options.correction
    return SparsityTarget(
        sparsity=options.sparsity,
        scope=Scope(options.scope),
        sends_ties=options.name != "topk",
        warmup_sparsities=warm.warmup_sparsities if warm is not None else (),
        warmup_steps=warm.warmup_steps if warm is not None else 0,
    )


def _transforms(config: Config, holder: Holder) -> Sequence[Transform[Any]]:
    made: list[Transform[Any]] = []
    correction = config.gradient.correction
    if correction is not None:
        if correction.clip_norm is not None:
            # Norms of independent gradients add up like the root of their number.
            made.append(Clip(correction.clip_norm / sqrt(config.parallel.trainers)))
        made.append(
            Momentum(
                momentum=correction.momentum,
                nesterov=correction.nesterov,
                masking=correction.masking,
            )
        )
    if config.gradient.residual == "update":
        made.append(Scale(holder.lr))
    return made


def _cltk(config: Config, holder: Holder) -> Compressor:
    options = config.gradient.cltk
    assert options is not None
    own = TopK(keep_count(holder.layout.size, config.gradient.sparsity))
    selector = _led(config, holder, own)
    return _feedback(config, holder.layout, selector, low_pass=options.low_pass)


def _led(config: Config, holder: Holder, own: Selector[Any]) -> Selector[Any]:
    return FromLeader(inner=own, trainer=holder.trainer, trainers=config.parallel.trainers)


def _deft(config: Config, holder: Holder) -> Compressor:
    options = config.gradient.deft
    assert options is not None
    selector = Deft(
        fragments=partition(holder.layout.counts, config.parallel.trainers),
        k=keep_count(holder.layout.size, config.gradient.sparsity),
        is_exact=options.budget == "exact",
        trainer=holder.trainer,
        trainers=config.parallel.trainers,
    )
    return _feedback(config, holder.layout, selector)


def _feedback(
    config: Config,
    layout: Layout,
    selector: Selector[Any],
    *,
    transforms: Sequence[Transform[Any]] = (),
    low_pass: float = 1.0,
    drain: Drain | None = None,
) -> Compressor:
    options = FeedbackOptions(
        dtype=dtype(config.gradient.precision),
        transforms=transforms,
        low_pass=low_pass,
        drain=drain,
    )
    return ErrorFeedback(layout, selector, options)


def _terngrad(config: Config, holder: Holder) -> Compressor:
    options = config.gradient.terngrad
    assert options is not None
    last = f"top.{len(config.model.top)}"
    return TernGrad(
        holder.layout,
        TernGradOptions(
            clip=options.clip,
            shares=options.sharing,
            encoding=CODES[options.encoding],
            smallest=options.smallest,
            exempt=frozenset((f"{last}.weight", f"{last}.bias")),
            seed=config.train.seed,
            trainer=holder.trainer,
        ),
    )


METHODS: Mapping[str, Method] = {
    "none": Method(_none),
    "dct": Method(_thresholded),
    "topk": Method(_thresholded),
    "dgc": Method(_thresholded),
    "redsync": Method(_thresholded),
    "gaussian": Method(_thresholded),
    "hard": Method(_thresholded),
    "sidco": Method(_thresholded),
    "cltk": Method(_cltk, (Op.LEADER,)),
    "deft": Method(_deft, (Op.LEADER, Op.UNION)),
    "terngrad": Method(_terngrad, (Op.MAX,)),
}
