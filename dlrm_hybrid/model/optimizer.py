"""Optimizers of the dense parameters and their learning rates.

One `apply` serves dense tensors and gathered elements: every operation is elementwise and rounds
the same wherever an element is stored, so applying to gathered elements and scattering them back
equals the dense update of those elements bit for bit. Learning rates are pure functions of the
step, which counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar, Protocol, final

import torch
from torch import Tensor
from typing_extensions import override

State = Mapping[str, Tensor]
STEP = "step"  # as in torch.optim.Adam


class DenseOptimizer(Protocol):
    """A rule that moves weights; its state is plain tensors shaped like the weight.

    Attributes:
        state_names: of the state tensors shaped like the weight; all begin as zeros.
        counts: whether the state also has `STEP`, one float32: number of updates so far.
        moves_all: whether an element may move though its gradient is zero, and so every update
            involves all elements. If not, elements that a gradient does not name keep value and
            state.
    """

    state_names: ClassVar[tuple[str, ...]]
    counts: ClassVar[bool]
    moves_all: ClassVar[bool]

    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Update `weight` and `state` in place; float32, all of one shape except `STEP`."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd(DenseOptimizer):
    """Plain gradient descent: w -= lr g."""

    state_names: ClassVar = ()
    counts: ClassVar = False
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
    counts: ClassVar = False
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
    counts: ClassVar = False
    moves_all: ClassVar = False

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        total = state["sum"]
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(self.eps), value=-lr)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adam(DenseOptimizer):
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; w -= lr m' / (sqrt(v') + eps).

    m' = m / (1 - b1^t), v' = v / (1 - b2^t) in update t (Kingma and Ba, 2015, algorithm 1), as
    torch.optim.Adam. A gradient that names some elements moves these alone, with the bias
    corrections of update t of the tensor: what torch.optim.SparseAdam calls lazy (but for eps,
    which it adds before it corrects v). Moving all others by their means as well would make every
    push of some weights a pull of all.

    Attributes:
        betas: b1 and b2.
        eps: added to the denominator.
        weight_decay: weights are multiplied by 1 - lr weight_decay before an update (Loshchilov
            and Hutter, 2019, algorithm 2), as torch.optim.AdamW; for gradients of all elements.
    """

    betas: tuple[float, float]
    eps: float
    weight_decay: float = 0.0
    state_names: ClassVar = ("exp_avg", "exp_avg_sq")
    counts: ClassVar = True
    moves_all: ClassVar = False

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        first, second = self.betas
        mean, square, step = (state[name] for name in (*self.state_names, STEP))
        step += 1
        updates = int(step)
        if self.weight_decay:
            weight.mul_(1 - lr * self.weight_decay)
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        denominator = square.sqrt().div_(sqrt(1 - second**updates)).add_(self.eps)
        weight.addcdiv_(mean, denominator, value=-lr / (1 - first**updates))


def init_state(optimizer: DenseOptimizer, weights: Mapping[str, Tensor]) -> dict[str, State]:
    """Zeroed state of every weight by the weight's name, then by the state's."""
    return {
        name: {
            **{state: torch.zeros_like(weight.detach()) for state in optimizer.state_names},
            **({STEP: torch.zeros(1)} if optimizer.counts else {}),
        }
        for name, weight in weights.items()
    }


LOWEST_DECAYED_LR = 1e-7  # as facebookresearch/dlrm


class Schedule(Protocol):
    """A learning rate as a function of the step."""

    def lr(self, step: int) -> float:
        """The learning rate of `step`, per update of the mean gradient."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(Schedule):
    """A constant learning rate."""

    base_lr: float

    @override
    def lr(self, step: int) -> float:
        return self.base_lr


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(Schedule):
    """Linear decay from the base rate at step 0 to 0 at `steps`, the end of the run.

    The base rate times the share of steps still to come, this one included.
    """

    base_lr: float
    steps: int

    @override
    def lr(self, step: int) -> float:
        return self.base_lr * max(0, self.steps - step) / self.steps


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau(Schedule):
    """A constant rate, multiplied by a factor whenever scores stop improving.

    Attributes:
        factor: that of each reduction, below 1.
        lowered: first step of each lower rate; appended to during the run.
    """

    base_lr: float
    factor: float
    lowered: Sequence[int]

    @override
    def lr(self, step: int) -> float:
        return self.base_lr * self.factor ** sum(first <= step for first in self.lowered)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessWarmup(Schedule):
    """Another schedule's rate / staleness^(1 - n / steps), in step n.

    Stale gradients harm most early on (Yang et al., 2021, PipeMare, arXiv 1910.05124, technique 1).

    Attributes:
        schedule: the other schedule.
        staleness: updates between computing a gradient and applying it; 0 and 1 change nothing.
        steps: number until the full rate.
    """

    schedule: Schedule
    staleness: int
    steps: int

    @override
    def lr(self, step: int) -> float:
        to_come = max(0.0, 1 - step / self.steps)
        return self.schedule.lr(step) / max(1, self.staleness) ** to_come


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay(Schedule):
    """Linear warm-up, a plateau, then quadratic decay; constant at the last rate afterwards.

    The plateau before a decay is the warm-up's last rate, (warmup_steps - 1) / warmup_steps of the
    base rate: as facebookresearch/dlrm (LRPolicyScheduler), whose count is 1 in step 0.

    Attributes:
        warmup_steps: number; 0 for none.
        decay_start_step: first step of the decay, not before the end of the warm-up.
        decay_steps: number; 0 for none.
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
