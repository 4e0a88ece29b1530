"""Activations as they are: what every other codec is measured against.

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import Key, Saved, Sections
from dlrm_hybrid.compress.activation.received import dense_tensor
from dlrm_hybrid.compress.activation.report import BoundaryReport
from dlrm_hybrid.wire.dense import dense


@final
class DenseCodec:
    """Every element as float32."""

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        """One section that views x_BN; the shape is kept."""
        return (dense(0, x_BN.numpy()),), x_BN.shape

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        """The activations; nothing is kept."""
        return dense_tensor(sections, shape, key), None

    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        """One section that views g_BN."""
        return (dense(0, g_BN.numpy()),)

    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        """The gradient."""
        return dense_tensor(sections, saved, key)

    def tensors(self) -> dict[str, Tensor]:
        """None: nothing lasts."""
        return {}

    def report(self) -> dict[int, BoundaryReport]:
        """Empty: nothing is left out."""
        return {}
