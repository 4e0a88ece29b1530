"""The choices of `gradient.threshold`, any of which serves `gradient=dct`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from dlrm_hybrid.bounds import STRICT, Bound, Part, Positive, Rate
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Rule, StageContext
from dlrm_hybrid.rng import fold

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule

BetweenZeroAndOne = Annotated[float, Bound(gt=0, lt=1)]


@dataclass(frozen=True, kw_only=True)
class SampleSettings:
    """Settings of the DGC rule: the size of its sample, and what is corrected.

    Attributes:
        part: of the elements that is sampled.
        lowest: part of `k` that is too few.
        highest: times `k` that is too many.
    """

    __pydantic_config__: ClassVar = STRICT

    part: Part
    lowest: Part
    highest: Annotated[float, Bound(ge=1)]


@dataclass(frozen=True, kw_only=True)
class RedsyncSettings:
    """Settings of the RedSync rule: bisect from mean to maximum, or come down from the maximum."""

    __pydantic_config__: ClassVar = STRICT

    search: Literal["bisect", "trim"]


@dataclass(frozen=True, kw_only=True)
class GaussianSettings:
    """Settings of the Gaussian rule: fit the values as published, or magnitudes as SIDCo."""

    __pydantic_config__: ClassVar = STRICT

    fit: Literal["signed", "magnitude"]


@dataclass(frozen=True, kw_only=True)
class HardSettings:
    """Settings of the hard rule: its magnitude; null is 1 / (2 √k), k elements of the model."""

    __pydantic_config__: ClassVar = STRICT

    magnitude: Rate | None


@dataclass(frozen=True, kw_only=True)
class SidcoSettings:
    """Settings of the SIDCo rule: its fits and the number of their stages.

    Attributes:
        distribution: fitted at every stage, but a gamma is followed by Pareto's.
        adaptation: how the number of stages follows what the estimates let through. `best` tries
            all numbers on the values at hand. `literal` is the paper's: one less where too many
            are let through, one more where too few, which is the wrong way for heavy tails.
            `flip` turns that direction round whenever the error has grown. A number is kept.
        window: estimates between two looks at the number of stages.
        tolerance: relative error of the elements let through, below which nothing is adapted.
        first_density: part of the elements that the first of several stages keeps.
        gamma: see `fits.gamma`.
    """

    __pydantic_config__: ClassVar = STRICT

    distribution: Literal["exponential", "gamma", "pareto"]
    adaptation: Literal["best", "literal", "flip"] | Annotated[int, Bound(ge=1, le=32)]
    window: Positive
    tolerance: BetweenZeroAndOne
    first_density: BetweenZeroAndOne
    gamma: Literal["exact", "closed"]


def _exact(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds.rule import Exact

    return Exact()


def _histogram(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds.rule import Histogram

    return Histogram()


def _dgc(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds.dgc import Dgc

    return Dgc(keys.of(SampleSettings), fold(context.seed, "trainer", context.trainer))


def _redsync(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds.search import Redsync

    return Redsync(keys.of(RedsyncSettings))


def _gaussian(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds.search import Gaussian

    return Gaussian(keys.of(GaussianSettings))


def _hard(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds.rule import Hard, target_k, usual_magnitude

    k = target_k(context.model_elements, keys.sparsity)
    return Hard(keys.of(HardSettings).magnitude or usual_magnitude(k))


def _sidco(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds.sidco import Sidco

    return Sidco(keys.of(SidcoSettings))


RULES = {
    "exact": Rule(build=_exact),
    "histogram": Rule(build=_histogram),
    "dgc": Rule(build=_dgc, sections={"dgc": SampleSettings}),
    "redsync": Rule(build=_redsync, sections={"redsync": RedsyncSettings}),
    "gaussian": Rule(build=_gaussian, sections={"gaussian": GaussianSettings}),
    "hard": Rule(build=_hard, sections={"hard": HardSettings}),
    "sidco": Rule(build=_sidco, sections={"sidco": SidcoSettings}),
}
