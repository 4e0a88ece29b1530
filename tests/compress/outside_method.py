"""A method of compression as somebody writes it outside the package: signs with error feedback.

Karimireddy et al., Error feedback fixes SignSGD and other gradient compression schemes, ICML 2019:
what is sent is the sign of gradient plus residual times the mean of its magnitudes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.bounds import Bound
from dlrm_hybrid.compress import Compressor, GradientMethod, StageContext
from dlrm_hybrid.compress.gradient.compressor import Encoding, Whole, all_sent
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Encoding as Code
from dlrm_hybrid.wire.ternary import ternary


@dataclass(frozen=True, kw_only=True)
class SignSgd(GradientMethod):
    """Sends the signs of gradients times their mean magnitude, with error feedback.

    Attributes:
        smallest: tensors with fewer elements are sent in float32.
    """

    is_sparse: ClassVar[bool] = False
    smallest: Annotated[int, Bound(ge=1)] = 32

    def build(self, context: StageContext) -> Compressor:
        return SignCompressor(context, self.smallest)


class SignCompressor(Compressor):
    """Keeps what signs leave of a gradient, and adds it to the next."""

    def __init__(self, context: StageContext, smallest: int) -> None:
        self.layout = context.layout
        self._large = {spec.name for spec in self.layout.specs if spec.count >= smallest}
        self._residuals = {
            spec.name: torch.zeros(spec.shape)
            for spec in self.layout.specs
            if spec.name in self._large
        }
        self._steps = 0

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        yield from ()
        self._steps += 1
        sections = {
            spec.name: dense(spec.id, gradients[spec.name].numpy())
            for spec in self.layout.specs
            if spec.name not in self._large
        }
        for spec in self.layout.specs:
            if spec.name in self._large:
                residual = self._residuals[spec.name].add_(gradients[spec.name])
                scale = np.float32(residual.abs().mean().item())
                if not np.isfinite(scale):
                    raise DivergedError(f"step {step}: gradient {spec.name} is not finite")
                codes_N = (residual.sign() + 1).to(torch.uint8).reshape(-1).numpy()
                residual.sub_(residual.sign(), alpha=float(scale))
                sections[spec.name] = ternary(spec.id, codes_N, Code.TERNARY, float(scale))
        return Whole({spec.name: sections[spec.name] for spec in self.layout.specs})

    def tensors(self) -> dict[str, Tensor]:
        return {f"{name}.residual": held for name, held in self._residuals.items()}

    def report(self) -> dict[str, SentReport]:
        steps, self._steps = self._steps, 0
        return all_sent(self.layout, steps)
