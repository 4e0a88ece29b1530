"""Optimizers of the dense parameters: one `apply` for whole tensors and for gathered elements.

Every operation is elementwise and rounds the same wherever an element stands, so applying to
gathered elements and scattering them back equals the dense update of those elements bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor

State = Mapping[str, Tensor]


class DenseOptimizer(Protocol):
    """A rule that moves weights; its memory is plain tensors shaped like the weight."""

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of the state tensors; all begin as zeros."""
        ...

    @property
    def moves_all(self) -> bool:
        """Whether an element whose gradient is zero may move: it has to be part of every update."""
        ...

    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Move `weight` and `state` in place; all shapes equal, float32."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Sgd:
    """w -= lr g."""

    @property
    def slots(self) -> tuple[str, ...]:
        """None."""
        return ()

    @property
    def moves_all(self) -> bool:
        """Its gradient is all that moves an element."""
        return False

    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Move `weight` in place."""
        weight.add_(gradient, alpha=-lr)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum:
    """m = momentum m + g; w -= lr m, as torch.optim.SGD without damping."""

    momentum: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The running sum of gradients."""
        return ("momentum",)

    @property
    def moves_all(self) -> bool:
        """The running sum goes on moving it."""
        return True

    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Move `weight` and `momentum` in place."""
        velocity = state["momentum"]
        velocity.mul_(self.momentum).add_(gradient)
        weight.add_(velocity, alpha=-lr)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Adagrad:
    """s += g²; w -= lr g / (sqrt(s) + eps) (Duchi et al., 2011)."""

    eps: float

    @property
    def slots(self) -> tuple[str, ...]:
        """The sum of squares."""
        return ("sum",)

    @property
    def moves_all(self) -> bool:
        """Its gradient is all that moves an element."""
        return False

    def apply(self, weight: Tensor, gradient: Tensor, state: State, lr: float) -> None:
        """Move `weight` and `sum` in place."""
        total = state["sum"]
        total.addcmul_(gradient, gradient)
        weight.addcdiv_(gradient, total.sqrt().add_(self.eps), value=-lr)


def init_state(optimizer: DenseOptimizer, weights: Mapping[str, Tensor]) -> dict[str, State]:
    """Zeroed state of every weight by the weight's name, then by slot."""
    return {
        name: {slot: torch.zeros_like(weight.detach()) for slot in optimizer.slots}
        for name, weight in weights.items()
    }
