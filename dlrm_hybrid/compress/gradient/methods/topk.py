"""`gradient=topk`, and the two rules that find the k-th magnitude itself."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

from typing_extensions import override

from dlrm_hybrid.compress.gradient.methods.thresholded import Thresholded
from dlrm_hybrid.compress.gradient.rule import OwnFinder

if TYPE_CHECKING:
    from dlrm_hybrid.arrays import Float32s
    from dlrm_hybrid.compress.gradient.rule import RuleState


@final
@dataclass(frozen=True, kw_only=True)
class TopK(Thresholded):
    """Sends the k largest elements of each tensor in every step (Aji and Heafield, EMNLP 2017).

    Attributes:
        threshold: found in one pass (histogram) or by sorting (exact); the result is the same.
    """

    name: ClassVar[str] = "topk"
    sends_ties: ClassVar[bool] = False
    threshold: Literal["histogram", "exact"] = "histogram"

    @override
    def faults(self) -> Iterator[tuple[str, str]]:
        yield from self.faults_of_thresholds()
        if self.lifespan != 1 or self.renewal != "fixed":
            key = "lifespan" if self.lifespan != 1 else "renewal"
            yield key, "gradient=topk selects anew every step; gradient=dct reuses thresholds"


@final
@dataclass(frozen=True, slots=True)
class ExactThreshold(OwnFinder):
    """The paper's threshold by partial sorting: element N - k of the ascending magnitudes.

    DCT (Gupta et al., KDD 2021), algorithm 1.
    """

    name: ClassVar[str] = "exact"

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        import numpy as np

        return float(np.partition(np.abs(x_N), x_N.size - k)[x_N.size - k])


@final
@dataclass(frozen=True, slots=True)
class CountedThreshold(OwnFinder):
    """The threshold of `ExactThreshold` by counting, many times faster; see kernels/magnitudes.py.

    Equal to it wherever the values are finite.
    """

    name: ClassVar[str] = "histogram"

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        from dlrm_hybrid.kernels import magnitudes

        return magnitudes.kth_magnitude(x_N, k)
