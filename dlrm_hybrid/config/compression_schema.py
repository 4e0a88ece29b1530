"""Types and bounds of the keys that say what is compressed and how; see `schema`."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from dlrm_hybrid.bounds import STRICT, BelowOne, Fraction, Positive, Precision
from dlrm_hybrid.config.gradient_sections import (
    CltkConfig,
    CorrectionConfig,
    DeftConfig,
    GaussianConfig,
    HardConfig,
    RedsyncConfig,
    SampleConfig,
    SidcoConfig,
    TerngradConfig,
)

LocalName = Literal["none", "dct", "topk", "dgc", "redsync", "gaussian", "hard", "sidco"]
MethodName = Literal[LocalName, "cltk", "deft", "terngrad"]
RuleName = Literal["exact", "histogram", "dgc", "redsync", "gaussian", "hard", "sidco"]


@dataclass(config=STRICT, frozen=True, kw_only=True)
class GradientConfig:
    """How dense gradients travel to the servers; see conf/gradient/ and `gradient_methods`.

    What a method does not read is null.
    """

    name: MethodName
    sparsity: Fraction
    precision: Precision
    threshold: RuleName | None
    scope: Literal["tensor", "stage"] | None
    aggregation: Literal["own", "union", "leader"] | None
    lifespan: Positive | None
    renewal: Literal["controlled", "fixed"] | None
    staggered: bool | None
    residual: Literal["gradient", "update"] | None
    drain: Literal["none", "discard", "flush"] | None
    drain_every: Positive | None
    dgc: SampleConfig | None
    redsync: RedsyncConfig | None
    gaussian: GaussianConfig | None
    hard: HardConfig | None
    sidco: SidcoConfig | None
    correction: CorrectionConfig | None
    cltk: CltkConfig | None
    deft: DeftConfig | None
    terngrad: TerngradConfig | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class ActivationConfig:
    """How activations and their gradients travel between stages; see conf/activation/.

    `allow_rice` belongs to `dct`, `observe` to `none`; null elsewhere.
    """

    name: Literal["none", "dct", "sketch", "gradient_topk"]
    sparsity: BelowOne | tuple[BelowOne, ...]
    precision: Precision
    allow_rice: bool | None
    evaluate_masked: bool
    observe: BelowOne | None


@dataclass(config=STRICT, frozen=True, kw_only=True)
class PullConfig:
    """How new weights travel from the servers."""

    precision: Precision
