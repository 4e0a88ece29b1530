"""Activations as they are: what every other codec is measured against.

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.activation.codec import (
    ActivationCodec,
    BoundaryReport,
    Key,
    Saved,
    Sections,
    Tally,
    dense_tensor,
)
from dlrm_hybrid.compress.activation.dct import largest_of_rows
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.wire.dense import dense


@final
class ObservedCodec(ActivationCodec):
    """Every element as float32, and the thresholds that a sparsity would set (KDD 2021, fig. 5)."""

    def __init__(self, sparsity: float) -> None:
        """The sparsity, in [0, 1), at which thresholds are measured."""
        self._sparsity = sparsity
        self._dense = DenseCodec()
        self._tally = Tally()

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        largest = largest_of_rows(x_BN, self._sparsity, key)
        self._tally.add(key.boundary, x_BN.numel(), x_BN.numel(), largest.tau_B)
        return self._dense.encode(x_BN, key)

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        return self._dense.decode(sections, shape, key)

    @override
    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        return self._dense.encode_gradient(g_BN, saved, key)

    @override
    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        return self._dense.decode_gradient(sections, saved, key)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {}

    @override
    def report(self) -> dict[int, BoundaryReport]:
        return self._tally.take()


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
