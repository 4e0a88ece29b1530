"""What a boundary with DCT-MP lets through, in torch's standard operators.

Shapes: B rows, N width of the boundary.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn


@final
class KeepLargest(nn.Module):
    """Keeps in each row the elements that reach its k-th largest magnitude; the others become 0.

    Evaluations of `activation=dct` see the same numbers, bit for bit with `dtype` of the wire.
    Gupta et al., KDD 2021, algorithm 2.

    Args:
        k: 1 to N.
        dtype: that what is kept is rounded to; None leaves it as it is.
    """

    def __init__(self, k: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.k = k
        self.dtype = dtype

    def forward(self, x_BN: Tensor) -> Tensor:
        """Of float32 (B, N), float32."""
        size_BN = x_BN.abs()
        least_B1 = size_BN.topk(self.k, dim=1).values[:, -1:]
        kept_BN = torch.where(size_BN >= least_B1, x_BN, 0.0)
        return kept_BN if self.dtype is None else kept_BN.to(self.dtype).to(torch.float32)
