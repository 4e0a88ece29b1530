"""`gradient=dgc`: momentum at the trainer, a warm-up, and the threshold of a sample.

Deep gradient compression (Lin et al., ICLR 2018).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from math import ceil, sqrt
from typing import TYPE_CHECKING, Annotated, ClassVar, final

from typing_extensions import override

from dlrm_hybrid.bounds import BelowOne, Bound, Count, Part, Rate
from dlrm_hybrid.compress.gradient.methods.thresholded import RuleName, Thresholded
from dlrm_hybrid.compress.gradient.rule import ThresholdFinder, ThresholdRule
from dlrm_hybrid.rng import fold, splitmix64

if TYPE_CHECKING:
    from torch import Tensor

    from dlrm_hybrid.arrays import Float32s
    from dlrm_hybrid.compress.gradient.context import StageContext
    from dlrm_hybrid.compress.gradient.rule import RuleState
    from dlrm_hybrid.compress.gradient.transforms import Transform

LEAST = 2  # elements of the sample that should reach the threshold
LOWER = 0.8
LOOKS = 10
SAMPLED = ("part", "lowest", "highest")


@final
@dataclass(frozen=True, kw_only=True)
class Dgc(Thresholded, ThresholdRule):
    """Deep gradient compression, with momentum correction and warm-up (Lin et al., ICLR 2018).

    It applies momentum itself: use an optimizer without.

    Attributes:
        threshold: rule that computes the threshold; DGC's own takes the k-th magnitude of a sample.
        part: fraction of the elements that is sampled.
        lowest: the threshold is lowered if fewer than this multiple of k elements exceed it.
        highest: the threshold is raised if more than this multiple of k elements exceed it.
        momentum: coefficient, applied before compression.
        nesterov: whether momentum is Nesterov's.
        masking: whether the momentum of elements that are sent is reset (factor masking).
        clip_norm: limit on the norm of a trainer's gradients, scaled by 1 / sqrt(trainers).
        warmup_steps: number of steps at each of `warmup_sparsities`, before `density` applies.
        warmup_sparsities: increasing sparsities of the warm-up.
    """

    name: ClassVar[str] = "dgc"
    optimizers: ClassVar[tuple[str, ...]] = ("sgd",)
    density: Part = 0.001
    threshold: RuleName = "dgc"
    part: Part = 0.01
    lowest: Part = 0.8
    highest: Annotated[float, Bound(ge=1)] = 1.3
    momentum: BelowOne = 0.9
    nesterov: bool = False
    masking: bool = True
    clip_norm: Rate | None = None
    warmup_steps: Count = 100
    warmup_sparsities: tuple[BelowOne, ...] = (0.75, 0.9375, 0.984375, 0.996)

    @override
    def faults(self) -> Iterator[tuple[str, str]]:
        yield from self.faults_of_thresholds()
        if [*self.warmup_sparsities] != sorted(self.warmup_sparsities):
            yield "warmup_sparsities", "must increase"
        if self.threshold != self.name:
            for field in fields(self):
                if field.name in SAMPLED and getattr(self, field.name) != field.default:
                    yield field.name, f"has no effect with threshold = {self.threshold!r}"

    @override
    def warmup(self) -> tuple[tuple[float, ...], int]:
        return self.warmup_sparsities, self.warmup_steps

    @override
    def transforms(self, context: StageContext) -> Sequence[Transform]:
        from dlrm_hybrid.compress.gradient.transforms import Clip, Momentum

        momentum = Momentum(momentum=self.momentum, nesterov=self.nesterov, masking=self.masking)
        if self.clip_norm is None:
            return [momentum]
        # Norms of independent gradients add up like the root of their number.
        return [Clip(self.clip_norm / sqrt(context.trainers)), momentum]

    @override
    def finder(self, context: StageContext) -> ThresholdFinder:
        return SampledThreshold(self, fold(context.seed, "trainer", context.trainer))


@final
@dataclass(frozen=True, slots=True)
class SampledThreshold(ThresholdFinder):
    """Takes the threshold of a sample, and corrects it where it lets too few or too many through.

    Deep gradient compression (Lin et al., ICLR 2018), section 5.

    Where too many elements reach it, those are searched for the threshold of exactly `k`
    (hierarchical selection). Where too few do, it falls step by step.

    Attributes:
        settings: size of the sample, and how far off its threshold may be.
        seed: of the samples; the first, second, … of every tensor draws with the same numbers.
    """

    settings: Dgc
    seed: int

    @override
    def init(self) -> dict[str, Tensor]:
        import torch

        return {"samples": torch.zeros(1, dtype=torch.int64, device="cpu")}

    @override
    def tau(self, x_N: Float32s, k: int, state: RuleState) -> float:
        from dlrm_hybrid.kernels import magnitudes

        count = x_N.size
        drawn = min(count, max(ceil(count * self.settings.part), ceil(LEAST * count / k)))
        samples = state["samples"]
        seed = fold(self.seed, "sample", int(samples.item()))
        sample_S = sample(x_N, seed, drawn)
        tau = magnitudes.kth_magnitude(sample_S, ceil(drawn * k / count))
        indices_K = magnitudes.reaching(x_N, tau)
        for _ in range(LOOKS):
            if indices_K.size >= self.settings.lowest * k or tau == 0:
                break
            tau *= LOWER
            indices_K = magnitudes.reaching(x_N, tau)
        # A tensor of nothing but zeros does not count.
        samples += int(indices_K.size > 0)
        if indices_K.size <= self.settings.highest * k:
            return tau
        return magnitudes.kth_magnitude(x_N[indices_K], k)


def sample(values_N: Float32s, seed: int, drawn: int) -> Float32s:
    """Draw random elements, in order: one of each of as many equal blocks, so none twice."""
    import numpy as np

    draws_S = splitmix64(seed, drawn)
    starts = np.arange(drawn + 1) * values_N.size // drawn
    chosen_S = draws_S % np.diff(starts).astype(np.uint64)
    return values_N[starts[:-1] + chosen_S.astype(np.int64)]
