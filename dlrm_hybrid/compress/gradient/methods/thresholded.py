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
    renewal: Literal["controlled", "fixed"] = "fixed"
    staggered: bool = False
    residual: Literal["gradient", "update"] = "gradient"
    precision: PrecisionOrLevels = "float32"
    drain: Literal["none", "discard", "flush"] = "none"
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
        """Those that all these methods have."""
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
            DrainMode,
            ErrorFeedback,
            FeedbackOptions,
        )
        from dlrm_hybrid.compress.gradient.transforms import Scale

        transforms = [*self.transforms(context)]
        if self.residual == "update":
            transforms.append(Scale(context.lr))
        drain = Drain(
            mode=DrainMode(self.drain),
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

    def _selector(self, context: StageContext) -> Selector:
        from dlrm_hybrid.compress.gradient.selector import FromLeader, Union
        from dlrm_hybrid.compress.gradient.thresholded import (
            Mode,
            Renewal,
            Scope,
            SparsityTarget,
            ThresholdSelector,
        )

        sparsities, steps = self.warmup()
        selector: Selector = ThresholdSelector(
            target=SparsityTarget(
                sparsity=1 - self.density,
                scope=Scope(self.scope),
                sends_ties=self.sends_ties,
                warmup_sparsities=sparsities,
                warmup_steps=steps,
            ),
            rule=self._finder(context),
            renewal=Renewal(steps=self.lifespan, mode=Mode(self.renewal), staggered=self.staggered),
        )
        if self.aggregation == "union":
            return Union(selector, dtype_of(self.precision))
        if self.aggregation == "leader":
            return FromLeader(inner=selector, trainer=context.trainer, trainers=context.trainers)
        return selector

    def _finder(self, context: StageContext) -> ThresholdFinder:
        """This record's own, or that of the rule that it names, with its defaults."""
        rule = rules()[getattr(self, "threshold", self.name)]
        return self.finder(context) if isinstance(self, rule) else rule().finder(context)
