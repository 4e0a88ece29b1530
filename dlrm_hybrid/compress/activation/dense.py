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
    Key,
    Mask,
    Sections,
    dense_sections,
    dense_tensor,
)
from dlrm_hybrid.compress.activation.dct import largest_of_rows
from dlrm_hybrid.compress.report import SentReport, Tally


@final
class DenseCodec(ActivationCodec):
    """Sends every element of activations and gradients as float32.

    Args:
        observe: a sparsity in [0, 1) whose thresholds are measured and reported, as in figure 5 of
            Gupta et al., KDD 2021; None for none.
    """

    def __init__(self, observe: float | None = None) -> None:
        self._observe = observe
        self._tally = Tally()

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        if self._observe is not None:
            largest = largest_of_rows(x_BN, self._observe, key)
            self._tally.add(x_BN.numel(), x_BN.numel(), largest.tau_B)
        return dense_sections(x_BN, "activation", key), None

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Mask]:
        return dense_tensor(sections, shape, key), None

    @override
    def encode_gradient(self, g_BN: Tensor, mask: Mask, key: Key) -> Sections:
        return dense_sections(g_BN, "gradient of activations", key)

    @override
    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        return dense_tensor(sections, shape, key)

    @override
    def report(self) -> SentReport | None:
        return self._tally.take()
