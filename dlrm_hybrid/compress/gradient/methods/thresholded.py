"""What all methods have in common that select elements by thresholds, with error feedback."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Protocol

from typing_extensions import override

from dlrm_hybrid.bounds import OneOf, Part, Positive, PrecisionOrLevels
from dlrm_hybrid.compress.gradient.methods import GradientMethod, dtype_of, rules

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.compressor import Compressor
    from dlrm_hybrid.compress.gradient.context import StageContext
    from dlrm_hybrid.compress.gradient.rule import ThresholdFinder
    from dlrm_hybrid.compress.gradient.selector import Selector
    from dlrm_hybrid.compress.gradient.transforms import Transform

DrainMode = Literal["none", "discard", "flush"]
Renewal = Literal["controlled", "fixed"]
RuleName = Annotated[str, OneOf(rules)]
ROUNDS = {"own": (), "union": ("union",), "leader": ("leader",)}


@dataclass(frozen=True, kw_only=True)
class Thresholded(GradientMethod, Protocol):
    """Settings shared by all methods that select elements by a threshold.

    Attributes:
        density: fraction of each tensor's elements that is sent; the rest stays in a residual.
        scope: one threshold per tensor, or one for all ("stage").
        aggregation: whose selection is sent: each trainer's own, the union, or a leader's in turn.
        lifespan: steps after which a threshold is computed again, at the latest.
        renewal: fixed; or controlled, which also renews at 20 % too few or 25 % too many elements.
        staggered: with fixed renewal, tensors renew their thresholds at different steps.
        residual: what accumulates: gradients, or updates (gradients times the learning rate).
        precision: type of the values sent; "levels" are integer multiples of a quantum.
        drain: whether residuals are discarded or sent ("flush") at random steps.
        drain_every: mean number of steps between two drains of a tensor.
    """

    alone: ClassVar[str] = "aggregation=own"
    sends_ties: ClassVar[bool] = True
    density: Part = 0.01
    scope: Literal["tensor", "stage"] = "tensor"
    aggregation: Literal["own", "union", "leader"] = "own"
    lifespan: Positive = 1
    renewal: Renewal = "fixed"
    staggered: bool = False
    residual: Literal["gradient", "update"] = "gradient"
    precision: PrecisionOrLevels = "float32"
    drain: DrainMode = "none"
    drain_every: Positive = 1_000_000

    @property
    @override
    def uses_lr(self) -> bool:
        return self.residual == "update"

    @override
    def rounds(self) -> tuple[str, ...]:
        return ROUNDS[self.aggregation]

    @override
    def faults(self) -> Iterator[tuple[str, str]]:
        yield from self.faults_of_thresholds()

    def faults_of_thresholds(self) -> Iterator[tuple[str, str]]:
        """The faults that all these methods may have."""
        if self.staggered and self.renewal != "fixed":
            yield "staggered", "only applies to renewal=fixed"
        if self.staggered and self.scope == "stage":
            yield "staggered", "scope=stage has one threshold for all tensors"
        if self.aggregation == "leader" and self.drain == "flush":
            yield (
                "drain",
                "with aggregation=leader a trainer cannot send a residual of its own; use discard "
                "or none",
            )

    @override
    def faults_among(self, trainers: int) -> Iterator[tuple[str, str]]:
        is_late = self.renewal == "fixed" and self.lifespan != 1
        if is_late and self.aggregation == "leader" and trainers > 1:
            yield (
                "lifespan",
                "with aggregation=leader a trainer selects in turns, which may never fall on a "
                "fixed renewal; use 1, or renewal=controlled",
            )

    @override
    def build(self, context: StageContext) -> Compressor:
        from dlrm_hybrid.compress.gradient.error_feedback import (
            Drain,
            ErrorFeedback,
            FeedbackOptions,
        )
        from dlrm_hybrid.compress.gradient.transforms import Scale

        transforms = [*self.transforms(context)]
        if self.residual == "update":
            transforms.append(Scale(context.lr))
        drain = Drain(
            mode=self.drain,
            every=self.drain_every,
            seed=context.seed,
            trainer=context.trainer,
        )
        options = FeedbackOptions(
            dtype=dtype_of(self.precision), transforms=transforms, drain=drain, levels=self.levels
        )
        return ErrorFeedback(context.layout, self._selector(context), options)

    def transforms(self, context: StageContext) -> Sequence[Transform]:
        """What happens to gradients before they join the residual."""
        return ()

    def warmup(self) -> tuple[tuple[float, ...], int]:
        """Sparsities of the first steps, and how many steps each lasts."""
        return (), 0

    def sparsity_at(self, step: int) -> float:
        """The fraction that a step, counted from 0, does not send."""
        sparsities, steps = self.warmup()
        if step >= steps * len(sparsities):
            return 1 - self.density
        return min(1 - self.density, sparsities[step // steps])

    def renews(self, *, step: int, age: int, sent: int, k: int) -> bool:
        """Whether a threshold that is kept for many steps must be found anew before this one.

        The paper keeps it for `lifespan` steps (DCT, algorithm 1). How many elements reach it
        drifts: at step 0 the residual is empty, so a threshold kept from there soon lets several
        times too many through. So the controlled renewal comes after `lifespan` steps, and as soon
        as the elements sent since the last one are fewer than 0.8 or more than 1.25 times what they
        should be, and by more than one step's worth: what a renewal takes out of the residual is
        missing in the steps that follow, and a tensor that should send 3 may well send 6.

        Args:
            step: counted from 0.
            age: steps for which the threshold has served.
            sent: elements that reached it in that time.
            k: elements that should reach it in each step.
        """
        if self.renewal == "fixed":
            return step % self.lifespan == 0
        expected = age * k
        too_few = 5 * (sent + k) < 4 * expected
        too_many = 4 * (sent - k) > 5 * expected
        return age >= self.lifespan or too_few or too_many

    def _selector(self, context: StageContext) -> Selector:
        from dlrm_hybrid.compress.gradient.selector import FromLeader, Union
        from dlrm_hybrid.compress.gradient.thresholded import ThresholdSelector

        selector: Selector = ThresholdSelector(self, self._finder(context))
        if self.aggregation == "union":
            return Union(selector, dtype_of(self.precision))
        if self.aggregation == "leader":
            return FromLeader(inner=selector, trainer=context.trainer, trainers=context.trainers)
        return selector

    def _finder(self, context: StageContext) -> ThresholdFinder:
        """This record's own finder, or that of the rule that it names, with its defaults."""
        rule = rules()[getattr(self, "threshold", self.name)]
        return self.finder(context) if isinstance(self, rule) else rule().finder(context)
