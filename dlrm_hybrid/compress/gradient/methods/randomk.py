"""`gradient=randomk`: k random elements, as a control (Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from dlrm_hybrid.bounds import STRICT
from dlrm_hybrid.compress.gradient.methods import GradientKeys, Method, StageContext
from dlrm_hybrid.rng import fold, splitmix64

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.accumulated import Accumulated
    from dlrm_hybrid.compress.gradient.collective import Op
    from dlrm_hybrid.compress.gradient.compressor import Compressor, Stateless
    from dlrm_hybrid.compress.gradient.layout import Layout
    from dlrm_hybrid.compress.gradient.selector import Selection


@dataclass(frozen=True, kw_only=True)
class RandomKSettings:
    """Settings of `gradient=randomk`: with a residual, or unbiased with values times N / k."""

    __pydantic_config__: ClassVar = STRICT

    feedback: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomK:
    """Selects the same k random elements in every trainer, so pulls are as sparse as pushes.

    Stich et al., Sparsified SGD with memory, NeurIPS 2018.

    Attributes:
        k: how many.
        seed: of the draws; the elements of a step depend on it and the step alone.
    """

    k: int
    seed: int

    @property
    def rounds(self) -> tuple[Op, ...]:
        """No collectives: trainers draw the same elements."""
        return ()

    def init(self, layout: Layout) -> Stateless:
        """An empty state."""
        from dlrm_hybrid.compress.gradient.compressor import Stateless

        return Stateless()

    def select(self, x: Accumulated, state: Stateless, step: int) -> Selection:
        """Select the elements with the k smallest of N random numbers, but no zeros."""
        import numpy as np

        from dlrm_hybrid.compress.gradient.layout import Indices

        yield from ()
        drawn_N = splitmix64(fold(self.seed, "randomk", step), x.values.size)
        chosen_K = np.argpartition(drawn_N, self.k - 1)[: self.k] if self.k else np.arange(0)
        chosen_K = np.sort(chosen_K[x.values[chosen_K] != 0])
        return Indices.of_flat(x.layout, chosen_K.astype(np.int32))


def _build(keys: GradientKeys, context: StageContext) -> Compressor:
    from dlrm_hybrid.compress.gradient.error_feedback import (
        Drain,
        DrainMode,
        ErrorFeedback,
        FeedbackOptions,
    )
    from dlrm_hybrid.compress.gradient.thresholds.rule import target_k
    from dlrm_hybrid.compress.gradient.transforms import Scale

    size = context.layout.size
    k = target_k(size, keys.sparsity)
    if keys.of(RandomKSettings).feedback:
        options = FeedbackOptions(dtype=keys.dtype, levels=keys.levels)
    else:
        # Every step forgets what the one before has not sent.
        drain = Drain(mode=DrainMode.DISCARD, every=1, seed=context.seed, trainer=context.trainer)
        scale = Scale(lambda step: size / max(k, 1))
        options = FeedbackOptions(dtype=keys.dtype, transforms=[scale], drain=drain)
    selector = RandomK(k=k, seed=context.seed)
    return ErrorFeedback(context.layout, selector, options, context.ops)


def _faults(keys: GradientKeys) -> Iterator[str]:
    if keys.levels and not keys.of(RandomKSettings).feedback:
        yield (
            "gradient.precision = 'levels': what rounds to zero must wait in a residual; "
            "needs gradient.randomk.feedback=true"
        )


METHODS = {"randomk": Method(build=_build, sections={"randomk": RandomKSettings}, faults=_faults)}
