"""The threshold of a sample (deep gradient compression, Lin et al., ICLR 2018, section 5)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.methods.thresholds import SampleSettings
from dlrm_hybrid.kernels.histogram import magnitude_of_rank
from dlrm_hybrid.kernels.moments import count_reaching, gather_reaching
from dlrm_hybrid.kernels.sample import sample
from dlrm_hybrid.rng import fold

LEAST = 2  # elements of the sample that should reach the threshold
LOWER = 0.8
LOOKS = 10


@final
@dataclass(frozen=True, slots=True)
class Dgc:
    """Sorts a sample; where the threshold is off, a second selection or a lower one corrects it.

    Where too many elements reach it, those are searched for the threshold of exactly `k`
    (hierarchical selection). Where too few do, it falls step by step.

    Attributes:
        settings: size of the sample, and how far off its threshold may be.
        seed: of the samples; the first, second, … of every tensor draws with the same numbers.
    """

    settings: SampleSettings
    seed: int

    def init(self) -> dict[str, Tensor]:
        """How many samples have been drawn."""
        return {"samples": torch.zeros(1, dtype=torch.int64)}

    def tau(self, accumulated_N: NDArray[np.float32], k: int, state: Mapping[str, Tensor]) -> float:
        """About the magnitude that `k` elements reach."""
        count = accumulated_N.size
        drawn = min(count, max(ceil(count * self.settings.part), ceil(LEAST * count / k)))
        samples = state["samples"]
        seed = fold(self.seed, "sample", int(samples.item()))
        sample_S = np.empty(drawn, np.float32)
        sample(accumulated_N, seed, sample_S)
        tau = magnitude_of_rank(sample_S, ceil(drawn * k / count))
        found = count_reaching(accumulated_N, tau)
        for _ in range(LOOKS):
            if found >= self.settings.lowest * k or tau == 0:
                break
            tau *= LOWER
            found = count_reaching(accumulated_N, tau)
        # All zeros leave no trace.
        samples += int(found > 0)
        if found <= self.settings.highest * k:
            return tau
        scratch_N = np.empty(count, np.float32)
        return magnitude_of_rank(scratch_N[: gather_reaching(accumulated_N, tau, scratch_N)], k)
