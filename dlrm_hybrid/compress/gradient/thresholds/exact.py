"""The paper's threshold, by sorting as far as needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Exact:
    """The magnitude at place N - k of all magnitudes in ascending order (DCT, algorithm 1)."""

    def init(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def tau(self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor]) -> float:
        """The magnitude that exactly `k` elements reach, more where some are equal."""
        place = accumulated_N.size - k
        return float(np.partition(np.abs(accumulated_N), place)[place])
