"""Momentum at the trainer instead of the server (deep gradient compression, Lin et al., ICLR 2018).

What a residual sends late would reach a server's momentum late. So each trainer lets its gradients
join a momentum of its own, and that joins the residual: sections 3.1 and 3.2 of the paper.

Shapes: N elements of all tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.sparsifier import Sparsifier
from dlrm_hybrid.kernels.moments import sums
from dlrm_hybrid.wire.section import Section


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """How momentum is kept.

    Attributes:
        momentum: m, 0 to below 1.
        nesterov: u = m (u + g), and u + g joins the residual; otherwise u = m u + g, which joins.
        masking: what is sent loses its momentum too, so that none is left that pulls where the
            weights have been.
        clip_norm: bound of the norm of all gradients of a step, times 1 / √trainers; None for none.
        trainers: whose mean the server takes.
    """

    momentum: float
    nesterov: bool
    masking: bool
    clip_norm: float | None
    trainers: int


@final
class MomentumCorrection:
    """Momentum before a sparsifier.

    What the receiver decodes plus the new residual is the momentum's step plus the old residual,
    bit for bit. The server must have no momentum.
    """

    def __init__(self, sparsifier: Sparsifier, options: CorrectionOptions) -> None:
        self.specs: Sequence[Spec] = sparsifier.specs
        self._sparsifier = sparsifier
        self._options = options
        self._momentum_N = np.zeros(sum(spec.count for spec in self.specs), np.float32)
        bounds = np.cumsum([spec.count for spec in self.specs])[:-1]
        parts = zip(self.specs, np.split(self._momentum_N, bounds), strict=True)
        self._momenta = {
            spec.name: torch.from_numpy(own_N).view(spec.shape) for spec, own_N in parts
        }
        self._ahead = {spec.name: torch.empty(spec.shape) for spec in self.specs}

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """As the sparsifier, of momenta."""
        own = {spec.name: gradients[spec.name] for spec in self.specs}
        joining = self._joining(own, self._clip(own))
        sections = self._sparsifier.encode(joining, step)
        if self._options.masking:
            self._sparsifier.clear_sent(self._momentum_N)
        return sections

    def tensors(self) -> dict[str, Tensor]:
        """Those of the sparsifier, and "<tensor>.momentum" of the tensor's shape."""
        momenta = {f"{name}.momentum": momentum for name, momentum in self._momenta.items()}
        return {**self._sparsifier.tensors(), **momenta}

    def report(self) -> dict[str, TensorReport]:
        """By tensor."""
        return self._sparsifier.report()

    def _joining(self, gradients: Mapping[str, Tensor], factor: float) -> Mapping[str, Tensor]:
        """What joins the residuals."""
        momentum = self._options.momentum
        if not self._options.nesterov:
            for name, gradient in gradients.items():
                self._momenta[name].mul_(momentum).add_(gradient, alpha=factor)
            return self._momenta
        for name, gradient in gradients.items():
            own, ahead = self._momenta[name], self._ahead[name]
            torch.mul(gradient, factor, out=ahead)
            own.add_(ahead).mul_(momentum)
            ahead.add_(own)
        return self._ahead

    def _clip(self, gradients: Mapping[str, Tensor]) -> float:
        """The factor that keeps the norm of a step's gradients below its bound."""
        if self._options.clip_norm is None:
            return 1.0
        bound = self._options.clip_norm / sqrt(self._options.trainers)
        squares = (sums(gradient.numpy().reshape(-1))[1] for gradient in gradients.values())
        norm = sqrt(sum(squares))
        # Where the norm is no number the factor is not used: the selection finds the fault.
        return bound / norm if norm > bound else 1.0
