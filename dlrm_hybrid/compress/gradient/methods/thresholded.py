"""`gradient=dct` and its special cases: selection by thresholds, with error feedback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import sqrt
from typing import TYPE_CHECKING, ClassVar

from dlrm_hybrid.bounds import STRICT, BelowOne, Count, Rate
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Method, StageContext, rules

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.selector import Selector
    from dlrm_hybrid.compress.gradient.transforms import Transform

KEYS = (
    *("threshold", "scope", "aggregation", "lifespan", "renewal", "staggered"),
    *("residual", "drain", "drain_every"),
)
ROUNDS = {"own": (), "union": ("union",), "leader": ("leader",)}


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """Settings of `gradient=dgc`: momentum in the trainer, and how the sparsity warms up."""

    __pydantic_config__: ClassVar = STRICT

    momentum: BelowOne
    nesterov: bool
    masking: bool
    clip_norm: Rate | None
    warmup_steps: Count
    warmup_sparsities: tuple[BelowOne, ...]


def _build(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.error_feedback import (
        Drain,
        DrainMode,
        ErrorFeedback,
        FeedbackOptions,
    )

    assert keys.drain_every is not None
    drain = Drain(
        mode=DrainMode(keys.drain),
        every=keys.drain_every,
        seed=context.seed,
        trainer=context.trainer,
    )
    options = FeedbackOptions(
        dtype=keys.dtype,
        transforms=_transforms(keys, context),
        drain=drain,
        levels=keys.levels,
    )
    return ErrorFeedback(context.layout, _selector(keys, context), options, context.ops)


def _selector(keys: GradientKeys, context: StageContext) -> Selector:
    from dlrm_hybrid.compress.gradient.selector import FromLeader, Union
    from dlrm_hybrid.compress.gradient.thresholded import (
        Mode,
        Renewal,
        Scope,
        SparsityTarget,
        Thresholded,
    )

    assert keys.threshold is not None
    assert keys.lifespan is not None and keys.staggered is not None
    warmup = keys.find(CorrectionSettings)
    selector: Selector = Thresholded(
        target=SparsityTarget(
            sparsity=keys.sparsity,
            scope=Scope(keys.scope),
            sends_ties=keys.name != "topk",
            warmup_sparsities=warmup.warmup_sparsities if warmup is not None else (),
            warmup_steps=warmup.warmup_steps if warmup is not None else 0,
        ),
        rule=rules()[keys.threshold].build(keys, context),
        renewal=Renewal(steps=keys.lifespan, mode=Mode(keys.renewal), staggered=keys.staggered),
    )
    if keys.aggregation == "union":
        return Union(selector, keys.dtype)
    if keys.aggregation == "leader":
        return FromLeader(inner=selector, trainer=context.trainer, trainers=context.trainers)
    return selector


def _transforms(keys: GradientKeys, context: StageContext) -> list[Transform]:
    from dlrm_hybrid.compress.gradient.transforms import Clip, Momentum, Scale

    transforms: list[Transform] = []
    correction = keys.find(CorrectionSettings)
    if correction is not None:
        if correction.clip_norm is not None:
            # Norms of independent gradients add up like the root of their number.
            transforms.append(Clip(correction.clip_norm / sqrt(context.trainers)))
        transforms.append(
            Momentum(
                momentum=correction.momentum,
                nesterov=correction.nesterov,
                masking=correction.masking,
            )
        )
    if keys.residual == "update":
        transforms.append(Scale(context.lr))
    return transforms


def _rounds(keys: GradientKeys) -> tuple[str, ...]:
    return ROUNDS[keys.aggregation or "own"]


def _topk_faults(keys: GradientKeys) -> Iterator[str]:
    if keys.lifespan != 1 or keys.renewal != "fixed":
        yield (
            f"gradient.lifespan = {keys.lifespan}, gradient.renewal = {keys.renewal!r}: "
            "gradient=topk selects anew every step; gradient=dct reuses thresholds"
        )


def _dgc_faults(keys: GradientKeys) -> Iterator[str]:
    correction = keys.find(CorrectionSettings)
    increasing = list(correction.warmup_sparsities) if correction is not None else []
    if increasing != sorted(increasing):
        yield f"gradient.correction.warmup_sparsities = {increasing}: must increase"


def _ruled(*thresholds: str) -> Method:
    """A method that a threshold rule defines."""
    return Method(build=_build, keys=KEYS, thresholds=thresholds, rounds=_rounds)


METHODS = {
    "dct": _ruled(),
    "topk": replace(_ruled("histogram", "exact"), faults=_topk_faults),
    "dgc": replace(
        _ruled(),
        sections={"correction": CorrectionSettings},
        optimizers=("sgd",),
        faults=_dgc_faults,
    ),
    "redsync": _ruled("redsync"),
    "gaussian": _ruled("gaussian"),
    "hard": _ruled("hard"),
    "sidco": _ruled("sidco"),
}
