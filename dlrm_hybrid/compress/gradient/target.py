"""How many elements should be sent at a step, and how long the threshold for that lives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import final

from dlrm_hybrid.compress.gradient.thresholds.rule import keep_count


class Scope(StrEnum):
    """What has one threshold: each tensor, or all of a stage together."""

    TENSOR = "tensor"
    STAGE = "stage"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SparsityTarget:
    """How many elements should be sent.

    Attributes:
        sparsity: fraction of the elements that is kept, 0 to 1.
        scope: what it is a fraction of.
        sends_ties: all elements that equal the threshold are sent; otherwise at most k, the first.
        warmup_sparsities: at the first steps, one after the other, where below `sparsity`.
        warmup_steps: at each of those.
    """

    sparsity: float
    scope: Scope
    sends_ties: bool
    warmup_sparsities: tuple[float, ...]
    warmup_steps: int

    @property
    def warmup_end(self) -> int:
        """The first step after the warm-up."""
        return self.warmup_steps * len(self.warmup_sparsities)

    def sparsity_at(self, step: int) -> float:
        """The sparsity of a step, counted from 0."""
        if step >= self.warmup_end:
            return self.sparsity
        return min(self.sparsity, self.warmup_sparsities[step // self.warmup_steps])

    def groups(self, tensors: int) -> list[range]:
        """The adjacent tensors that share a threshold."""
        if self.scope is Scope.STAGE:
            return [range(tensors)] if tensors else []
        return [range(tensor, tensor + 1) for tensor in range(tensors)]

    def ks(self, counts: Sequence[int], step: int) -> list[int]:
        """How many elements of each group should be sent at a step, of as many as it has."""
        sparsity = self.sparsity_at(step)
        return [keep_count(count, sparsity) for count in counts]


class Mode(StrEnum):
    """When a threshold ends early."""

    CONTROLLED = "controlled"
    FIXED = "fixed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """When a threshold is found anew.

    The paper keeps a threshold for L steps (DCT, algorithm 1). How many elements reach it drifts:
    at step 0 the residual is empty, so a threshold kept from there soon lets several times too many
    through. The controlled renewal looks at what was really sent.

    Attributes:
        steps: L; the longest life.
        mode: FIXED renews at every multiple of L, as in the paper. CONTROLLED renews after L
            steps, and as soon as the elements sent since the last renewal are fewer than 0.8 or
            more than 1.25 times what they should be, and by more than one step's worth: what a
            renewal takes out of the residual is missing in the steps that follow, and a tensor
            that should send 3 elements may well send 6.
        staggered: spread the fixed renewals of the groups evenly over L steps; controlled ones
            drift apart by themselves.
    """

    steps: int
    mode: Mode
    staggered: bool

    def lead(self, group: int, groups: int) -> int:
        """Steps by which the fixed renewals of a group of several come early."""
        return group * self.steps // groups if self.staggered else 0

    def is_due(self, *, step: int, age: int, sent: int, k: int) -> bool:
        """Whether the threshold must be renewed before this step.

        Args:
            step: counted from 0, plus the group's lead.
            age: steps for which the threshold has served.
            sent: elements that reached it in that time.
            k: elements that should reach it in each step.
        """
        if self.mode is Mode.FIXED:
            return step % self.steps == 0
        expected = age * k
        too_few = 5 * (sent + k) < 4 * expected
        too_many = 4 * (sent - k) > 5 * expected
        return age >= self.steps or too_few or too_many
