"""Activations as they are: what every other codec is measured against.

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Saved, Sections
from dlrm_hybrid.compress.activation.received import dense_tensor
from dlrm_hybrid.compress.activation.report import BoundaryReport
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.wire.dense import dense


@final
class DenseCodec(ActivationCodec):
    """Every element as float32."""

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        return (dense(0, host_array(x_BN, "activation", key)),), x_BN.shape

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        return dense_tensor(sections, shape, key), None

    @override
    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        return (dense(0, host_array(g_BN, "gradient of activations", key)),)

    @override
    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        return dense_tensor(sections, saved, key)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {}

    @override
    def report(self) -> dict[int, BoundaryReport]:
        return {}
