"""Tables looked up by torch and updated by our kernels, where FBGEMM cannot.

Shapes: F tables, D embedding dimension, B bags of each table, K ids, E = F B + 1 offsets of bags.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from dlrm_hybrid.kernels.rows import Gradients, bag_keys
from dlrm_hybrid.model.rows.optimizer import EmbeddingOptions, Rows, key_shift

Int64s = NDArray[np.int64]


class TableKernel(Protocol):
    """Tables of one width in this process, updated in backward."""

    def __call__(self, ids_K: Tensor, offsets_E: Tensor) -> Tensor:
        """Look up and sum the rows of bags, float32 (B, F D).

        Args:
            ids_K: int64, bags of one table after the other.
            offsets_E: int64, begin of each bag in them, and their number.
        """
        ...

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of the rows of the next lookups."""
        ...

    def tensors(self) -> list[dict[str, Tensor]]:
        """Views of each table by name: `weight`, and its optimizer's state."""
        ...


@final
class OwnKernel(TableKernel):
    """Tables of any width with any optimizer.

    Args:
        rows_F: rows per table; may be 0.
        dim: D.
        options: their optimizer.
    """

    def __init__(self, rows_F: Sequence[int], dim: int, options: EmbeddingOptions) -> None:
        self.rows = Rows(rows_F, dim, options)
        self._rows_F = np.array(rows_F, np.int64)
        self._lr = 0.0
        # Empty: it only makes autograd call backward.
        self._leaf = torch.empty(0, requires_grad=True)

    @override
    def __call__(self, ids_K: Tensor, offsets_E: Tensor) -> Tensor:
        return cast(Tensor, _LookUp.apply(self._leaf, self, ids_K, offsets_E, self._lr))

    @override
    def set_lr(self, lr: float) -> None:
        self._lr = lr

    @override
    def tensors(self) -> list[dict[str, Tensor]]:
        return [self.rows.tensors(table) for table in range(len(self._rows_F))]

    def look_up(self, ids_K: Tensor, offsets_E: Tensor) -> tuple[Tensor, Int64s, int]:
        """Sum the rows of bags (B, F D); returns also the ids' keys, unsorted, and their shift."""
        tables, weights_RD = len(self._rows_F), self.rows.weights_RD
        bags = (len(offsets_E) - 1) // tables
        shift = key_shift(len(weights_RD), tables * bags)
        keys_K = np.empty(len(ids_K), np.int64)
        bad = bag_keys(
            *(ids_K.numpy(), offsets_E.numpy(), self.rows.starts_F, self._rows_F),
            *(bags, shift, keys_K),
        )
        if bad >= 0:
            table = int(np.searchsorted(offsets_E[::bags].numpy(), bad, side="right")) - 1
            raise RuntimeError(
                f"id {int(ids_K[bad])} is out of bounds: "
                f"table {table + 1} has {self._rows_F[table]} rows"
            )
        found_FBD = functional.embedding_bag(
            *(torch.from_numpy(keys_K >> shift), weights_RD, offsets_E),
            mode="sum",
            include_last_offset=True,
        ).view(tables, bags, weights_RD.shape[1])
        pooled_BFD = found_FBD.transpose(0, 1).contiguous()
        return pooled_BFD.view(bags, tables * weights_RD.shape[1]), keys_K, shift


@final
class _LookUp(torch.autograd.Function):
    """Looks up rows of bags; backward updates them."""

    @staticmethod
    def forward(
        ctx: Any, _leaf: Tensor, kernel: OwnKernel, ids_K: Tensor, offsets_E: Tensor, lr: float
    ) -> Tensor:
        pooled_BW, keys_K, shift = kernel.look_up(ids_K, offsets_E)
        ctx.rows, ctx.keys_K, ctx.shift, ctx.lr = kernel.rows, keys_K, shift, lr
        return pooled_BW

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        ctx.keys_K.sort()
        dim = ctx.rows.weights_RD.shape[1]
        gradient_GD = gradients[0].contiguous().view(-1, dim).numpy()
        ctx.rows.update(Gradients(ctx.keys_K, ctx.shift, gradient_GD), ctx.lr)
        return None, None, None, None, None
