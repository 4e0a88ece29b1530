"""Residuals emptied at random, now and then (DCT, section 3.3).

Stale mass may gather in a residual; the paper empties it about once in a million steps. The stream
is counter-based: whether a residual is drained at a step does not depend on what came before.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import final

from dlrm_hybrid.rng import fold


class DrainMode(StrEnum):
    """What becomes of a drained residual."""

    NONE = "none"
    DISCARD = "discard"
    FLUSH = "flush"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """When residuals are emptied, and where they go.

    Attributes:
        mode: DISCARD forgets the residual before the gradient joins it; FLUSH sends residual and
            gradient whole; NONE never drains.
        every: steps between two drains of a tensor, on average.
        seed: of the run.
        trainer: whose residuals these are; each draws its own steps.
    """

    mode: DrainMode
    every: int
    seed: int
    trainer: int

    def due(self, name: str, step: int) -> bool:
        """Whether the residual of a tensor is drained at this step: with probability 1/every."""
        if self.mode is DrainMode.NONE:
            return False
        return fold(self.seed, "drain", self.trainer, name, step) % self.every == 0
