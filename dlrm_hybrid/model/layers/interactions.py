"""How the output of the bottom MLP and the rows of the tables meet.

Shapes: B batch, F vectors of a row (bottom MLP first, then the tables), D their width,
P = F(F-1)/2 pairs.
"""

from __future__ import annotations

from typing import Any, cast, final

import torch
from torch import Tensor, nn


@final
class _PairDots(torch.autograd.Function):
    """Forward one batched product and one gather; backward one gather and one batched product."""

    @staticmethod
    def forward(ctx: Any, x_BD: Tensor, e_BED: Tensor, pair_P: Tensor, column_FF: Tensor) -> Tensor:
        z_BFD = torch.cat((x_BD.unsqueeze(1), e_BED), 1)
        dots_BFF = torch.bmm(z_BFD, z_BFD.transpose(1, 2))
        ctx.save_for_backward(z_BFD, column_FF)
        return torch.cat((x_BD, dots_BFF.flatten(1).index_select(1, pair_P)), 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (g_BW,) = gradients
        z_BFD, column_FF = ctx.saved_tensors
        num_rows, num_vectors, dim = z_BFD.shape
        # d(z z^T) is symmetric with an empty diagonal: every pair's gradient is in it twice.
        # The diagonal reads some column and is cleared.
        g_BFF = g_BW.index_select(1, column_FF).view(num_rows, num_vectors, num_vectors)
        g_BFF.diagonal(dim1=1, dim2=2).zero_()
        g_BFD = torch.bmm(g_BFF, z_BFD)
        return g_BFD[:, 0] + g_BW[:, :dim], g_BFD[:, 1:], None, None


@final
class DotInteraction(nn.Module):
    """x_BD and e_BED → (B, D + P): x, then the dots of i with j for i < F, for j < i.

    The order of the pairs and the absence of self-pairs as facebookresearch/dlrm.
    """

    _pairs: Tensor
    _columns: Tensor

    def __init__(self, num_vectors: int, dim: int) -> None:
        super().__init__()
        row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        position_FF = torch.zeros(num_vectors, num_vectors, dtype=torch.int64)
        position_FF[row, column] = torch.arange(dim, dim + len(row))
        position_FF += position_FF.t().clone()
        self.register_buffer("_pairs", row * num_vectors + column, persistent=False)
        self.register_buffer("_columns", position_FF.flatten(), persistent=False)

    def forward(self, x_BD: Tensor, e_BED: Tensor) -> Tensor:
        """The input of the top MLP, float32 (B, D + P)."""
        return cast(Tensor, _PairDots.apply(x_BD, e_BED, self._pairs, self._columns))
