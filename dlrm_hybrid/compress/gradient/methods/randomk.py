"""`gradient=randomk`: k random elements, as a control (Stich et al., NeurIPS 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from typing_extensions import override

from dlrm_hybrid.bounds import Part, PrecisionOrLevels
from dlrm_hybrid.compress.gradient.methods import GradientMethod, dtype_of
from dlrm_hybrid.rng import fold, splitmix64

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.collective import Op
    from dlrm_hybrid.compress.gradient.compressor import Compressor, Stateless
    from dlrm_hybrid.compress.gradient.context import StageContext
    from dlrm_hybrid.compress.gradient.layout import Layout
    from dlrm_hybrid.compress.gradient.selector import Accumulated, Selection


@final
@dataclass(frozen=True, kw_only=True)
class RandomK(GradientMethod):
    """Random-k, a control: all send the same random elements (Stich et al., NeurIPS 2018).

    Attributes:
        density: fraction of all elements that is sent.
        precision: type of the values sent; "levels" are integer multiples of a quantum.
        feedback: true keeps the rest in a residual; false drops it, and sends values times N / k.
    """

    name: ClassVar[str] = "randomk"
    density: Part = 0.01
    precision: PrecisionOrLevels = "float32"
    feedback: bool = True

    @override
    def faults(self) -> Iterator[tuple[str, str]]:
        if self.levels and not self.feedback:
            yield "precision", "what rounds to zero must wait in a residual; needs feedback=true"

    @override
    def build(self, context: StageContext) -> Compressor:
        from dlrm_hybrid.compress.gradient.error_feedback import (
            Drain,
            ErrorFeedback,
            FeedbackOptions,
        )
        from dlrm_hybrid.compress.gradient.rule import target_k
        from dlrm_hybrid.compress.gradient.transforms import Scale

        size, seed = context.layout.size, context.seed
        k, dtype = target_k(size, 1 - self.density), dtype_of(self.precision)
        if self.feedback:
            options = FeedbackOptions(dtype=dtype, levels=self.levels)
        else:
            # Every step forgets what the one before has not sent.
            drain = Drain(mode="discard", every=1, seed=seed, trainer=context.trainer)
            scale = Scale(lambda step: size / max(k, 1))
            options = FeedbackOptions(dtype=dtype, transforms=[scale], drain=drain)
        selector = RandomSelector(k=k, seed=seed)
        return ErrorFeedback(context.layout, selector, options)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSelector:
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
        drawn_N = splitmix64(fold(self.seed, "randomk", step), x.layout.size)
        chosen_K = np.argpartition(drawn_N, self.k - 1)[: self.k] if self.k else np.arange(0)
        chosen_K = np.sort(chosen_K).astype(np.int32)
        values_K = x.values_at(Indices.of_flat(x.layout, chosen_K))
        return Indices.of_flat(x.layout, chosen_K[values_K != 0])
