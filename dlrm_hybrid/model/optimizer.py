"""Optimizers of the dense parameters, the section `optimizer`, and their learning rates.

One `apply` serves dense tensors and gathered elements: every operation is elementwise and rounds
the same wherever an element is stored, so applying to gathered elements and scattering them back
equals the dense update of those elements bit for bit. Learning rates are pure functions of the
step, which counts from 0. Free of torch when it is loaded.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, final

from typing_extensions import override

from dlrm_hybrid.bounds import (
    BelowOne,
    BetweenZeroAndOne,
    Count,
    Decay,
    Epsilon,
    LearningRate,
    Positive,
)
from dlrm_hybrid.record import WEIGHTS, Choice, Effect, key

if TYPE_CHECKING:
    from torch import Tensor

OptimizerState = Mapping[str, "Tensor"]
STEP = "step"  # as in torch.optim.Adam


class _Optimizer(Choice, effect=Effect.NEW_RUN, choice=WEIGHTS):
    """Values of the choices of `optimizer` that have no such key."""

    lr: LearningRate
    decoupled_weight_decay: bool = False


@dataclass(frozen=True, kw_only=True)
class Optimizer(_Optimizer):
    """The optimizer of the dense layers and the learning rate over the steps.

    A rule that moves weights; its state is plain tensors shaped like the weight.
    """

    state_names: ClassVar[tuple[str, ...]] = ()
    """Names of the state tensors shaped like the weight; all begin as zeros."""
    counts: ClassVar[bool] = False
    """Whether the state also has `STEP`, one float32: number of updates so far."""
    moves_all: ClassVar[bool] = False
    """Whether an element may move though its gradient is zero, so that every update involves all
    elements. If not, elements that a gradient does not name keep value and state."""

    weight_decay: Decay = key(
        0.0, "this times the weights is added to the gradients of dense layers (L2)"
    )
    schedule: Literal["constant", "linear", "warmup_decay", "plateau"] = key(
        "constant",
        "how rates change: linear decays to 0 over the run, plateau where scores get no better",
    )
    warmup_steps: Count = key(0, "steps from 0 to lr", only="optimizer.schedule=warmup_decay")
    decay_start_step: Count = key(
        0, "first step of the quadratic decay", only="optimizer.decay_steps"
    )
    decay_steps: Count = key(
        0, "length of the decay; 0 never decays", only="optimizer.schedule=warmup_decay"
    )
    plateau_factor: BetweenZeroAndOne = key(
        0.1, "factor for all rates where scores get no better", only="optimizer.schedule=plateau"
    )
    plateau_patience: Positive = key(
        1,
        "evaluations in a row without a better train.monitor, after which rates fall",
        only="optimizer.schedule=plateau",
    )
    staleness_warmup_steps: Positive | None = key(
        None, "lr of stale dense gradients rises from lr / staleness in so many steps"
    )

    @abstractmethod
    def apply(self, weight: Tensor, gradient: Tensor, state: OptimizerState, lr: float) -> None:
        """Update `weight` and `state` in place; float32, all of one shape except `STEP`."""

    @property
    def l2(self) -> float:
        """Weight decay that is added to gradients; 0 where it is decoupled from them."""
        return 0.0 if self.decoupled_weight_decay else self.weight_decay

    def rates(self, base_lr: float, steps: int, lowered: Sequence[int] = ()) -> LrSchedule:
        """The learning rate over a run.

        Args:
            lowered: first steps of lower rates of `schedule=plateau`; appended to.
        """
        if self.schedule == "plateau":
            return Plateau(base_lr=base_lr, factor=self.plateau_factor, lowered=lowered)
        if self.schedule == "linear":
            return Linear(base_lr=base_lr, steps=steps)
        if self.schedule == "warmup_decay":
            return WarmupDecay(
                base_lr=base_lr,
                warmup_steps=self.warmup_steps,
                decay_start_step=self.decay_start_step,
                decay_steps=self.decay_steps,
            )
        return Constant(base_lr=base_lr)


LR = "learning rate of the dense layers"


@final
@dataclass(frozen=True, kw_only=True)
class Sgd(Optimizer):
    """Stochastic gradient descent.

    w -= lr g
    """

    name: ClassVar[str] = "sgd"
    lr: LearningRate = key(0.1, LR)

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: OptimizerState, lr: float) -> None:
        weight.add_(gradient, alpha=-lr)


@final
@dataclass(frozen=True, kw_only=True)
class Momentum(Optimizer):
    """Stochastic gradient descent with a velocity.

    m = momentum m + g; w -= lr m, as torch.optim.SGD without damping.
    """

    name: ClassVar[str] = "momentum"
    state_names: ClassVar[tuple[str, ...]] = ("momentum",)
    moves_all: ClassVar[bool] = True
    lr: LearningRate = key(0.01, LR)
    momentum: BelowOne = key(0.9, "coefficient of the velocity")

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: OptimizerState, lr: float) -> None:
        velocity = state["momentum"]
        velocity.mul_(self.momentum).add_(gradient)
        weight.add_(velocity, alpha=-lr)


@final
@dataclass(frozen=True, kw_only=True)
class Adagrad(Optimizer):
    """Adagrad (Duchi et al., 2011).

    s += g²; w -= lr g / (sqrt(s) + eps)
    """

    name: ClassVar[str] = "adagrad"
    state_names: ClassVar[tuple[str, ...]] = ("sum",)
    lr: LearningRate = key(0.01, LR)
    eps: Epsilon = key(1e-10, "added to the denominator")

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: OptimizerState, lr: float) -> None:
        total = state["sum"]
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(self.eps), value=-lr)


@final
@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015); AdamW with weight_decay and decoupled_weight_decay=true.

    m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g²; w -= lr m' / (sqrt(v') + eps), where
    m' = m / (1 - b1^t), v' = v / (1 - b2^t) in update t (algorithm 1), as torch.optim.Adam.
    A gradient that names some elements moves these alone, with the bias corrections of update t of
    the tensor: what torch.optim.SparseAdam calls lazy (but for eps, which it adds before it
    corrects v). Moving all others by their means as well would make every push of some weights a
    pull of all.

    With decoupled decay, weights are multiplied by 1 - lr weight_decay before an update (Loshchilov
    and Hutter, 2019, algorithm 2), as torch.optim.AdamW; for gradients of all elements.
    """

    name: ClassVar[str] = "adam"
    state_names: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    counts: ClassVar[bool] = True
    lr: LearningRate = key(0.001, LR)
    betas: tuple[BelowOne, BelowOne] = key(
        (0.9, 0.999), "coefficients of the running means of gradients and of their squares"
    )
    eps: Epsilon = key(1e-8, "added to the denominator")
    decoupled_weight_decay: bool = key(
        False,
        "weights shrink by lr · weight_decay instead (AdamW); not with gradients sent sparsely",
    )

    @override
    def apply(self, weight: Tensor, gradient: Tensor, state: OptimizerState, lr: float) -> None:
        first, second = self.betas
        mean, square, step = (state[name] for name in (*self.state_names, STEP))
        step += 1
        updates = int(step)
        if self.decoupled_weight_decay and self.weight_decay:
            weight.mul_(1 - lr * self.weight_decay)
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        denominator = square.sqrt().div_(sqrt(1 - second**updates)).add_(self.eps)
        weight.addcdiv_(mean, denominator, value=-lr / (1 - first**updates))


def init_state(optimizer: Optimizer, weights: Mapping[str, Tensor]) -> dict[str, OptimizerState]:
    """Zeroed state of every weight by the weight's name, then by the state's."""
    return {
        name: {
            **{state: weight.detach().new_zeros(weight.shape) for state in optimizer.state_names},
            # On the host, which reads it.
            **({STEP: weight.detach().new_zeros(1, device="cpu")} if optimizer.counts else {}),
        }
        for name, weight in weights.items()
    }


LOWEST_DECAYED_LR = 1e-7  # as facebookresearch/dlrm


class LrSchedule(Protocol):
    """A learning rate as a function of the step."""

    def lr(self, step: int) -> float:
        """The learning rate of `step`, per update of the mean gradient."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Constant(LrSchedule):
    """The same learning rate at every step."""

    base_lr: float

    @override
    def lr(self, step: int) -> float:
        return self.base_lr


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Linear(LrSchedule):
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
class Plateau(LrSchedule):
    """A constant rate, multiplied by a factor whenever scores stop improving.

    Attributes:
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
class StalenessWarmup(LrSchedule):
    """Another schedule's rate / staleness^(1 - n / steps), in step n.

    Stale gradients harm most early on (Yang et al., 2021, PipeMare, arXiv 1910.05124, technique 1).

    Attributes:
        staleness: updates between computing a gradient and applying it; 0 and 1 change nothing.
        steps: number until the full rate.
    """

    schedule: LrSchedule
    staleness: int
    steps: int

    @override
    def lr(self, step: int) -> float:
        to_come = max(0.0, 1 - step / self.steps)
        return self.schedule.lr(step) / max(1, self.staleness) ** to_come


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupDecay(LrSchedule):
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
