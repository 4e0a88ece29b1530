"""How long a threshold lives.

The paper keeps a threshold for L steps (DCT, algorithm 1). What it lets through drifts: at step 0
the residual is empty, so a threshold kept from there soon lets several times too many elements
through. The controlled renewal looks at what really left.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final


class Renewal(StrEnum):
    """When a threshold ends early."""

    CONTROLLED = "controlled"
    FIXED = "fixed"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LifeSpan:
    """When to renew a threshold.

    Attributes:
        steps: L; the longest life.
        renewal: FIXED renews at every multiple of L, as in the paper. CONTROLLED renews after L
            steps, and as soon as the elements sent since the last renewal are fewer than 0.8 or
            more than 1.25 times what they should be, and by more than one step's worth: what a
            renewal takes out of the residual is missing in the steps that follow, and a tensor
            that should send 3 elements may well send 6.
        staggered: spread the fixed renewals of the tensors evenly over L steps; controlled ones
            drift apart by themselves.
    """

    steps: int
    renewal: Renewal
    staggered: bool

    def offset(self, place: int, places: int) -> int:
        """Steps by which the fixed renewals of tensor `place` of `places` come early."""
        return place * self.steps // places if self.staggered else 0

    def ended(self, *, step: int, age: int, sent: int, keep: int) -> bool:
        """Whether the threshold must be renewed before this step.

        Args:
            step: counted from 0, plus the tensor's offset.
            age: steps for which the threshold has served.
            sent: elements that reached it in that time.
            keep: elements that should reach it in each step.
        """
        if self.renewal is Renewal.FIXED:
            return step % self.steps == 0
        expected = age * keep
        too_few = 5 * (sent + keep) < 4 * expected
        too_many = 4 * (sent - keep) > 5 * expected
        return age >= self.steps or too_few or too_many
