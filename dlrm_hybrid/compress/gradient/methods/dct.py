"""`gradient=dct`: thresholds that live for many steps, found by any rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from dlrm_hybrid.bounds import Positive
from dlrm_hybrid.compress.gradient.methods.thresholded import Renewal, RuleName, Thresholded


@final
@dataclass(frozen=True, kw_only=True)
class Dct(Thresholded):
    """DCT-DP: sends what exceeds a long-lived threshold (Gupta et al., KDD 2021).

    Attributes:
        threshold: rule that computes it, with its defaults. To set its options, use the method of
            the rule instead: `Sidco(window=3, lifespan=1000, renewal="controlled")`.
    """

    name: ClassVar[str] = "dct"
    threshold: RuleName = "histogram"
    lifespan: Positive = 1000
    renewal: Renewal = "controlled"
