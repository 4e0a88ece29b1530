"""Learning rates as pure functions of the step, which counts from 0."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, final

LOWEST_DECAYED_LR = 1e-7  # as facebookresearch/dlrm


class Schedule(Protocol):
    """The learning rate of every step."""

    def lr(self, step: int) -> float:
        """The learning rate of `step`, per update of the mean gradient."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """The same rate for ever."""

    base_lr: float

    def lr(self, step: int) -> float:
        """The base rate."""
        return self.base_lr


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """From the base rate at step 0 on a line to 0 at `steps`, the end of the run."""

    base_lr: float
    steps: int

    def lr(self, step: int) -> float:
        """The base rate times the share of steps still to come, this one included."""
        return self.base_lr * max(0, self.steps - step) / self.steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay:
    """Linear warm-up, a plateau, then quadratic decay; frozen at the last rate afterwards.

    The plateau before a decay is the warm-up's last rate, (warmup_steps - 1) / warmup_steps of the
    base rate: as facebookresearch/dlrm (LRPolicyScheduler), whose count stands at 1 in step 0.

    Attributes:
        warmup_steps: 0 for none.
        decay_start_step: not before the end of the warm-up.
        decay_steps: 0 for none.
    """

    base_lr: float
    warmup_steps: int
    decay_start_step: int
    decay_steps: int

    def lr(self, step: int) -> float:
        """The rate of `step`."""
        count = step + 1
        if count < self.warmup_steps:
            return self.base_lr * count / self.warmup_steps
        if self.decay_steps == 0:
            return self.base_lr
        if count < self.decay_start_step:
            warm = max(self.warmup_steps, 1)
            return self.base_lr * max(warm - 1, 1) / warm
        decayed = min(count - self.decay_start_step, self.decay_steps - 1)
        share = (self.decay_steps - decayed) / self.decay_steps
        return max(LOWEST_DECAYED_LR, self.base_lr * share**2)
