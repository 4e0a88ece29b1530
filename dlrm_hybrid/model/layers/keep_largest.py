"""The sparsification of a DCT-MP boundary, in torch's standard operators.

Shapes: B rows, N width of the boundary.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from dlrm_hybrid.kernels.levels.steps import LARGEST_TOP, SMALLEST_TOP, SPLITTER, inverse_aim


@final
class KeepLargest(nn.Module):
    """Keeps the elements of each row that reach its k-th largest magnitude, and clears the others.

    Evaluations of `activation=dct` see these numbers, bit for bit if `dtype` is that of the wire.
    Gupta et al., KDD 2021, algorithm 2.

    Args:
        k: 1 to N.
        dtype: type that kept elements are rounded to; None does not round.
        bits: bits of the levels, per row, that values are rounded to; None rounds to `dtype`.
    """

    def __init__(self, k: int, dtype: torch.dtype | None = None, bits: int | None = None) -> None:
        super().__init__()
        self.k = k
        self.dtype = dtype
        self.bits = bits

    def forward(self, x_BN: Tensor) -> Tensor:
        """Sparsify float32 (B, N) to float32 (B, N)."""
        size_BN = x_BN.abs()
        least_B1 = size_BN.topk(self.k, dim=1).values[:, -1:]
        if self.bits is not None:
            level_BN, step_B1 = levels(size_BN, self.bits)
            return torch.where(size_BN >= least_B1, x_BN.sign() * level_BN * step_B1, 0.0)
        kept_BN = torch.where(size_BN >= least_B1, x_BN, 0.0)
        return kept_BN if self.dtype is None else kept_BN.to(self.dtype).to(torch.float32)


def levels(size_BN: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Round magnitudes to levels from 1 on; returns also the rows' steps (B, 1)."""
    top_B1 = size_BN.amax(dim=1, keepdim=True).clamp(float(SMALLEST_TOP), float(LARGEST_TOP))
    exact_B1 = top_B1 * inverse_aim(bits)
    split_B1 = exact_B1 * SPLITTER
    step_B1 = split_B1 - (split_B1 - exact_B1)
    return (size_BN / step_B1).round().clamp(1.0, float(2**bits - 1)), step_B1
