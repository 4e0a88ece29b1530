"""The paper's threshold, by sorting as far as needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
from dlrm_hybrid.kernels.ops import Ops


@final
@dataclass(frozen=True, slots=True)
class Exact(ThresholdRule):
    """The magnitude at place N - k of all magnitudes in ascending order (DCT, algorithm 1)."""

    @override
    def init(self) -> dict[str, Tensor]:
        return {}

    @override
    def tau(
        self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor], ops: Ops
    ) -> float:
        place = accumulated_N.size - k
        return float(np.partition(np.abs(accumulated_N), place)[place])
