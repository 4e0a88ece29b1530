"""The choices of `gradient.threshold`, any of which serves `gradient=dct`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import STRICT, Part, Positive, Rate
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Rule, StageContext
from dlrm_hybrid.rng import fold

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule

BetweenZeroAndOne = Annotated[float, Field(gt=0, lt=1)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SampleSettings:
    """Settings of the DGC rule: the size of its sample, and what is corrected.

    Attributes:
        part: of the elements that is sampled.
        lowest: part of `k` that is too few.
        highest: times `k` that is too many.
    """

    part: Part
    lowest: Part
    highest: Annotated[float, Field(ge=1)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class RedsyncSettings:
    """Settings of the RedSync rule: bisect from mean to maximum, or come down from the maximum."""

    search: Literal["bisect", "trim"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GaussianSettings:
    """Settings of the Gaussian rule: fit the values as published, or magnitudes as SIDCo."""

    fit: Literal["signed", "magnitude"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class HardSettings:
    """Settings of the hard rule: its magnitude; null is 1 / (2 √k), k elements of the model."""

    magnitude: Rate | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
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

    distribution: Literal["exponential", "gamma", "pareto"]
    adaptation: Literal["best", "literal", "flip"] | Annotated[int, Field(ge=1, le=32)]
    window: Positive
    tolerance: BetweenZeroAndOne
    first_density: BetweenZeroAndOne
    gamma: Literal["exact", "closed"]


def _build(keys: GradientKeys, context: StageContext) -> ThresholdRule:
    from dlrm_hybrid.compress.gradient.thresholds import rule, search
    from dlrm_hybrid.compress.gradient.thresholds.dgc import Dgc
    from dlrm_hybrid.compress.gradient.thresholds.sidco import Sidco

    match keys.threshold:
        case "exact":
            return rule.Exact()
        case "histogram":
            return rule.Histogram()
        case "dgc":
            seed = fold(context.seed, "trainer", context.trainer)
            return Dgc(keys.of(SampleSettings), seed)
        case "redsync":
            return search.Redsync(keys.of(RedsyncSettings))
        case "gaussian":
            return search.Gaussian(keys.of(GaussianSettings))
        case "hard":
            k = rule.target_k(context.model_elements, keys.sparsity)
            return rule.Hard(keys.of(HardSettings).magnitude or rule.usual_magnitude(k))
        case "sidco":
            return Sidco(keys.of(SidcoSettings))
        case _:
            raise ValueError(f"gradient.threshold = {keys.threshold}: no such rule")


RULES = {
    "exact": Rule(build=_build),
    "histogram": Rule(build=_build),
    "dgc": Rule(build=_build, sections={"dgc": SampleSettings}),
    "redsync": Rule(build=_build, sections={"redsync": RedsyncSettings}),
    "gaussian": Rule(build=_build, sections={"gaussian": GaussianSettings}),
    "hard": Rule(build=_build, sections={"hard": HardSettings}),
    "sidco": Rule(build=_build, sections={"sidco": SidcoSettings}),
}
