"""Rows' thresholds measured, and nothing left out: what DCT-MP does to them is told by both.

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.activation.codec import ActivationCodec, Key, Saved, Sections
from dlrm_hybrid.compress.activation.dense import DenseCodec
from dlrm_hybrid.compress.activation.largest import largest_of_rows
from dlrm_hybrid.compress.activation.report import BoundaryReport, Tally


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
