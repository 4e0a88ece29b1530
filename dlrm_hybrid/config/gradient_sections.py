"""Types and bounds of what only one threshold rule or one method of gradients reads.

Their values are in conf/gradient/base/sections.yaml.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import STRICT, BelowOne, Count, Part, Positive, Rate

Inside = Annotated[float, Field(gt=0, lt=1)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SampleConfig:
    """DGC's threshold: of a sample, corrected where too few or too many elements reach it."""

    part: Part
    lowest: Part
    highest: Annotated[float, Field(ge=1)]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class RedsyncConfig:
    """RedSync's search between the mean and the largest magnitude."""

    search: Literal["bisect", "trim"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GaussianConfig:
    """The values a normal distribution is fitted to: as they are, or their magnitudes."""

    fit: Literal["signed", "magnitude"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class HardConfig:
    """One magnitude for all tensors and steps; null is 1 / (2 √k), k elements of the model."""

    magnitude: Rate | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class SidcoConfig:
    """SIDCo's fitted distribution and the number of its stages."""

    distribution: Literal["exponential", "gamma", "pareto"]
    adaptation: Literal["best", "literal", "flip"] | Annotated[int, Field(ge=1, le=32)]
    window: Positive
    tolerance: Inside
    first_density: Inside
    gamma: Literal["exact", "closed"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CorrectionConfig:
    """DGC's momentum in the trainer, and how the sparsity rises to its value."""

    momentum: BelowOne
    nesterov: bool
    masking: bool
    clip_norm: Rate | None
    warmup_steps: Count
    warmup_sparsities: tuple[BelowOne, ...]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class CltkConfig:
    """The low-pass filter of ScaleCom; 1 is plain error feedback."""

    low_pass: Part


@dataclass(config=STRICT, frozen=True, kw_only=True)
class DeftConfig:
    """Whether the delegate's budget holds for all, or everyone's own as in the paper."""

    budget: Literal["exact", "paper"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class TerngradConfig:
    """What becomes ternary and how; a null clip is none."""

    clip: Rate | None
    sharing: bool
    encoding: Literal["bits", "trits"]
    smallest: Positive
    pull: Literal["levels", "weights"]
