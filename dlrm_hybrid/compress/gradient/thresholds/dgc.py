"""The threshold of a sample (deep gradient compression, Lin et al., ICLR 2018, section 5)."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.layout import Float32s
from dlrm_hybrid.compress.gradient.methods.thresholds import SampleSettings
from dlrm_hybrid.compress.gradient.thresholds.rule import RuleState, ThresholdRule
from dlrm_hybrid.kernels.ops import Ops
from dlrm_hybrid.rng import fold, splitmix64

LEAST = 2  # elements of the sample that should reach the threshold
LOWER = 0.8
LOOKS = 10


@final
@dataclass(frozen=True, slots=True)
class Dgc(ThresholdRule):
    """Takes the threshold of a sample, and corrects it where it lets too few or too many through.

    Deep gradient compression (Lin et al., ICLR 2018), section 5.

    Where too many elements reach it, those are searched for the threshold of exactly `k`
    (hierarchical selection). Where too few do, it falls step by step.

    Attributes:
        settings: size of the sample, and how far off its threshold may be.
        seed: of the samples; the first, second, … of every tensor draws with the same numbers.
    """

    settings: SampleSettings
    seed: int

    @override
    def init(self) -> dict[str, Tensor]:
        return {"samples": torch.zeros(1, dtype=torch.int64, device="cpu")}

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState, ops: Ops) -> float:
        count = x_N.size
        drawn = min(count, max(ceil(count * self.settings.part), ceil(LEAST * count / k)))
        samples = state["samples"]
        seed = fold(self.seed, "sample", int(samples.item()))
        sample_S = sample(x_N, seed, drawn)
        tau = ops.kth_magnitude(sample_S, ceil(drawn * k / count))
        indices_K = ops.compact(x_N, tau)
        for _ in range(LOOKS):
            if indices_K.size >= self.settings.lowest * k or tau == 0:
                break
            tau *= LOWER
            indices_K = ops.compact(x_N, tau)
        # All zeros do not count.
        samples += int(indices_K.size > 0)
        if indices_K.size <= self.settings.highest * k:
            return tau
        return ops.kth_magnitude(x_N[indices_K], k)


def sample(values_N: Float32s, seed: int, drawn: int) -> Float32s:
    """Draw random elements, in order: one of each of as many equal blocks, so none twice.

    Args:
        values_N: at least as many as are drawn.
        seed: not negative; the same one draws the same indices.
        drawn: how many, S.
    """
    draws_S = splitmix64(seed, drawn)
    starts = np.arange(drawn + 1) * values_N.size // drawn
    chosen_S = draws_S % np.diff(starts).astype(np.uint64)
    return values_N[starts[:-1] + chosen_S.astype(np.int64)]
