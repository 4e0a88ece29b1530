"""Optimizers of the dense parameters and their learning rates.

One `apply` serves dense tensors and gathered elements: every operation is elementwise and rounds
the same wherever an element is stored, so applying to gathered elements and scattering them back
equals the dense update of those elements bit for bit. Learning rates are pure functions of the
step, which counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

State = Mapping[str, Tensor]


class DenseOptimizer(Protocol):
    """A rule that moves weights; its state is plain tensors shaped like the weight.

    Attributes:
        state_names: of the state tensors; all begin as zeros.
        moves_all: whether an element whose gradient is zero may move: then it has to be part of
            every update.
    """

    state_names: ClassVar[tuple[str, ...]]
    moves_all: ClassVar[bool]

    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Move `weight` and `state` in place; all shapes equal, float32."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(DenseOptimizer):
    """w -= lr g."""

    state_names: ClassVar = ()
    moves_all: ClassVar = False

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        weight.add_(gradient, alpha=-lr)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum(DenseOptimizer):
    """m = momentum m + g; w -= lr m, as torch.optim.SGD without damping."""

    momentum: float
    state_names: ClassVar = ("momentum",)
    moves_all: ClassVar = True

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        velocity = state["momentum"]
        velocity.mul_(self.momentum).add_(gradient)
        weight.add_(velocity, alpha=-lr)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad(DenseOptimizer):
    """s += g²; w -= lr g / (sqrt(s) + eps) (Duchi et al., 2011)."""

    eps: float
    state_names: ClassVar = ("sum",)
    moves_all: ClassVar = False

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        total = state["sum"]
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(self.eps), value=-lr)


def init_state(optimizer: DenseOptimizer, weights: Mapping[str, Tensor]) -> dict[str, State]:
    """Zeroed state of every weight by the weight's name, then by the state's."""
    return {
        name: {state: torch.zeros_like(weight.detach()) for state in optimizer.state_names}
        for name, weight in weights.items()
    }


LOWEST_DECAYED_LR = 1e-7  # as facebookresearch/dlrm


class Schedule(Protocol):
    """The learning rate of every step."""

    def lr(self, step: int) -> float:
        """The learning rate of `step`, per update of the mean gradient."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Schedule):
    """The same rate for ever."""

    base_lr: float

    @override
    def lr(self, step: int) -> float:
        return self.base_lr


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Joined(Schedule):
    """One schedule for the first `steps`, then another, which counts from 0 as well."""

    first: Schedule
    steps: int
    then: Schedule

    @override
    def lr(self, step: int) -> float:
        return (self.first if step < self.steps else self.then).lr(step)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Schedule):
    """From the base rate at step 0 on a line to 0 at `steps`, the end of the run.

    The base rate times the share of steps still to come, this one included.
    """

    base_lr: float
    steps: int

    @override
    def lr(self, step: int) -> float:
        return self.base_lr * max(0, self.steps - step) / self.steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessWarmup(Schedule):
    """Another schedule's rate / staleness^(1 - n / steps), n steps after the first stale one.

    In early training a stale gradient does most harm (Yang et al., 2021, PipeMare, arXiv
    1910.05124, technique 1).

    Attributes:
        schedule: the other one.
        staleness: updates between computing a gradient and applying it; 0 and 1 change nothing.
        steps: until the whole rate.
        first: the first step with stale gradients; before it this schedule is not asked.
    """

    schedule: Schedule
    staleness: int
    steps: int
    first: int = 0

    @override
    def lr(self, step: int) -> float:
        to_come = max(0.0, 1 - (step - self.first) / self.steps)
        return self.schedule.lr(step) / max(1, self.staleness) ** to_come


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay(Schedule):
    """Linear warm-up, a plateau, then quadratic decay; frozen at the last rate afterwards.

    The plateau before a decay is the warm-up's last rate, (warmup_steps - 1) / warmup_steps of the
    base rate: as facebookresearch/dlrm (LRPolicyScheduler), whose count is 1 in step 0.

    Attributes:
        warmup_steps: 0 for none.
        decay_start_step: not before the end of the warm-up.
        decay_steps: 0 for none.
    """

    base_lr: float
    warmup_steps: int
    decay_start_step: int
    decay_steps: int

    @override
    def lr(self, step: int) -> float:
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
