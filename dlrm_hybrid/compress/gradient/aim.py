"""How many elements should leave at a step, and of what."""

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
class Aim:
    """What should leave.

    Attributes:
        sparsity: part of the elements that stays, 0 to 1.
        scope: what it is a part of.
        sends_ties: all elements that equal the threshold leave; otherwise no more than should, the
            first ones.
        warmup_sparsities: at the first steps, one after the other, where below `sparsity`.
        warmup_steps: at each of those.
    """

    sparsity: float
    scope: Scope
    sends_ties: bool
    warmup_sparsities: tuple[float, ...]
    warmup_steps: int

    def sparsity_at(self, step: int) -> float:
        """The sparsity of a step, counted from 0."""
        if step >= self.warmup_steps * len(self.warmup_sparsities):
            return self.sparsity
        return min(self.sparsity, self.warmup_sparsities[step // self.warmup_steps])

    def units(self, tensors: int) -> list[range]:
        """The places of tensors that share a threshold."""
        if self.scope is Scope.STAGE:
            return [range(tensors)] if tensors else []
        return [range(place, place + 1) for place in range(tensors)]

    def keeps(self, counts: Sequence[int], step: int) -> list[int]:
        """How many elements of each unit should leave at a step, of as many as it has."""
        sparsity = self.sparsity_at(step)
        return [keep_count(count, sparsity) for count in counts]
