"""DCT-MP: the largest activations of every row cross, and so do their gradients, no others.

The receiver gets the mask with the activations, so values alone travel back. Both ends hold
it as the flat positions of what was kept: one mask for forward and backward. To autograd this is
x * mask with a constant mask.

What is kept is rounded afterwards: thresholds are those of the numbers as they were, and few
numbers need rounding.

At sparsity 0 every number but 0 is sent, and the gradient at a 0 is lost. Boundaries follow a
ReLU, whose derivative there is 0, so training is the same as with `DenseCodec` to the bit.

Shapes: B rows of a micro-batch, N width of the boundary, K elements kept of all B * N.
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
    kept_gradients,
    largest_of_rows,
    only_section,
    scattered,
    scattered_section,
)
from dlrm_hybrid.compress.report import SentReport, Tally
from dlrm_hybrid.wire.dense import packed
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import rows, rows_of


@final
class ThresholdCodec(ActivationCodec):
    """DCT-MP: sends the largest activations of every row and the gradients of just these.

    Gupta et al., KDD 2021, algorithm 2.

    Args:
        sparsity: fraction of a row that is left out, in [0, 1).
        dtype: of the values on the wire, both ways: FLOAT32, BFLOAT16 or FLOAT16.
        allow_rice: take fewer bytes for indices where that takes more CPU time.
    """

    selects_anywhere = True

    def __init__(self, *, sparsity: float, dtype: Dtype, allow_rice: bool) -> None:
        self._sparsity = sparsity
        self._dtype = dtype
        self._allow_rice = allow_rice
        self._tally = Tally()

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        largest = largest_of_rows(x_BN, self._sparsity, key)
        self._tally.add(x_BN.numel(), largest.indices_K.size, largest.tau_B)
        section = rows(
            0,
            (x_BN.shape[0], x_BN.shape[1]),
            largest.indices_K,
            largest.values_K,
            self._dtype,
            allow_rice=self._allow_rice,
        )
        return (section,), largest.indices_K

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Mask]:
        section = only_section(sections, self._dtype, shape, key, dense=False)
        indices_K, values_K = rows_of(section, (shape[0], shape[1]))
        return scattered(indices_K, values_K, shape), indices_K

    @override
    def encode_gradient(self, g_BN: Tensor, mask: Mask, key: Key) -> Sections:
        _, values_K = kept_gradients(g_BN, mask, key)
        return (packed(0, values_K, self._dtype),)

    @override
    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        assert mask is not None
        section = only_section(sections, self._dtype, mask.shape, key, dense=True)
        return scattered_section(mask, section, shape)

    @override
    def report(self) -> SentReport | None:
        return self._tally.take()
