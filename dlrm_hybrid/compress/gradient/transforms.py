"""What gradients go through before they join the residual: clipping, momentum, the learning rate.

Shapes: N elements of T tensors, K of them sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.compressor import State, Stateless
from dlrm_hybrid.compress.gradient.layout import Indices, Layout


class Gradients(NamedTuple):
    """Gradients of T tensors, and a factor that is still to be multiplied in.

    Attributes:
        tensors: float32, contiguous.
        factor: rounded to float32 where it is used; 1 for none.
    """

    tensors: Sequence[Tensor]
    factor: float


class Transform(Protocol):
    """One step on the way of gradients to the residual; remembers nothing itself.

    `state` is what `init` made for the layout, changed in place.
    """

    def init(self, layout: Layout) -> State:
        """Fresh state for the tensors of a layout."""
        return Stateless()

    def update(self, gradients: Gradients, state: Any, step: int) -> Gradients:
        """The gradients to use instead; those given are not changed."""
        ...

    def sent(self, indices: Indices, state: Any) -> None:
        """Take note of the elements that were sent."""


@final
@dataclass(frozen=True, slots=True)
class Clip(Transform):
    """Clips the norm of all gradients of a step (DGC, Lin et al., ICLR 2018, section 3.3).

    Attributes:
        norm: the bound of one trainer.
    """

    norm: float

    @override
    def update(self, gradients: Gradients, state: Stateless, step: int) -> Gradients:
        squares = [tensor.double().square().sum().item() for tensor in gradients.tensors]
        norm = abs(gradients.factor) * sqrt(sum(squares))
        # Where the norm is no number the factor is not used: the selection finds the fault.
        cut = self.norm / norm if norm > self.norm else 1.0
        return gradients._replace(factor=gradients.factor * cut)


@final
@dataclass(frozen=True, slots=True)
class Scale(Transform):
    """Multiplies gradients by a factor that depends on the step, such as the learning rate.

    Attributes:
        factor: by step, counted from 0.
    """

    factor: Callable[[int], float]

    @override
    def update(self, gradients: Gradients, state: Stateless, step: int) -> Gradients:
        return gradients._replace(factor=gradients.factor * self.factor(step))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Momentum(Transform):
    """Applies momentum at the trainer, so that what a residual delays has its momentum in time.

    Deep gradient compression (Lin et al., ICLR 2018, sections 3.1 and 3.2). The server must have no
    momentum.

    Attributes:
        momentum: m, 0 to below 1.
        nesterov: u = m (u + g), and u + g is the result; otherwise u = m u + g is.
        masking: what is sent loses its momentum too, so that none is left that pulls where the
            weights have been.
    """

    momentum: float
    nesterov: bool
    masking: bool

    @override
    def init(self, layout: Layout) -> Momenta:
        return Momenta(layout)

    @override
    def update(self, gradients: Gradients, state: Momenta, step: int) -> Gradients:
        momentum, factor = self.momentum, gradients.factor
        if not self.nesterov:
            for u, gradient in zip(state.views, gradients.tensors, strict=True):
                u.mul_(momentum).add_(gradient, alpha=factor)
            return Gradients(state.views, 1.0)
        triples = zip(state.views, state.ahead, gradients.tensors, strict=True)
        for u, ahead, gradient in triples:
            torch.mul(gradient, factor, out=ahead)
            u.add_(ahead).mul_(momentum)
            ahead.add_(u)
        return Gradients(state.ahead, 1.0)

    @override
    def sent(self, indices: Indices, state: Momenta) -> None:
        if self.masking:
            state.momentum_N[indices.flat] = 0


@final
class Momenta(State):
    """The state of `Momentum`: a momentum for each element.

    Attributes:
        layout: as given.
        momentum_N: float32, of all tensors.
        views: of it, for each tensor in its shape.
        ahead: room for u + g, of each tensor.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.momentum_N = np.zeros(layout.size, np.float32)
        self.views = list(self.tensors().values())
        self.ahead = layout.room()

    @override
    def tensors(self) -> dict[str, Tensor]:
        return self.layout.tensors(self.momentum_N, "momentum")
