"""A batch's ids without repetition: rows are looked up once, equal ids' gradients are summed.

Shapes: B rows of a batch, F tables, D embedding dimension, K distinct ids, T trainers, L tables
that are looked up, N bags of each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.kernels.distinct import collapse, lay_out, sum_rows

Int64s = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class DistinctIds:
    """What one trainer's batch asks for.

    Attributes:
        ids_K: table after table, ascending in each.
        counts_F: how many are of each table, in the same order of tables.
        places_BF: int64, where in `ids_K` each id of the batch is.
    """

    ids_K: Int64s
    counts_F: Int64s
    places_BF: Tensor

    def spread(self, rows_KD: Tensor) -> Tensor:
        """The rows of all ids of the batch (B, F, D), from those of the distinct ids."""
        shape = (*self.places_BF.shape, rows_KD.shape[1])
        return rows_KD.index_select(0, self.places_BF.view(-1)).view(shape)

    def summed(self, gradient_BFD: Tensor) -> Tensor:
        """The gradients of the distinct ids (K, D): sums of float32 in the order of the batch."""
        sum_KD = gradient_BFD.new_zeros(len(self.ids_K), gradient_BFD.shape[2])
        sum_rows(gradient_BFD.contiguous().numpy(), self.places_BF.numpy(), sum_KD.numpy())
        return sum_KD


def sorted_keys(ids_FB: Tensor) -> tuple[Int64s, int]:
    """Ids with the rows of the batch in which they stand, ascending in each table.

    Args:
        ids_FB: int64; at most 2**31.

    Returns:
        id << shift | row, and the shift.
    """
    num_rows = ids_FB.shape[1]
    shift = num_rows.bit_length()
    keys_FB = (ids_FB.numpy() << shift) | np.arange(num_rows)
    keys_FB.sort(axis=1)
    return keys_FB, shift


def distinct_ids(ids_FB: Tensor, order_F: Int64s) -> DistinctIds:
    """The distinct ids of a batch.

    Args:
        ids_FB: int64; at most 2**31.
        order_F: the order of tables in which to list them.
    """
    num_tables, num_rows = ids_FB.shape
    keys_FB, shift = sorted_keys(ids_FB)
    ids_K = np.empty(ids_FB.numel(), np.int64)
    counts_F = np.empty(num_tables, np.int64)
    places_BF = torch.empty(num_rows, num_tables, dtype=torch.int64)
    num_ids = collapse(keys_FB, shift, order_F, ids_K, counts_F, places_BF.numpy())
    return DistinctIds(ids_K[:num_ids], counts_F, places_BF)


@final
@dataclass(frozen=True, slots=True, eq=False)
class DistinctBags:
    """One bag for each distinct id of each trainer, as FBGEMM takes them: N for every table.

    In a table trainers come in their order, so gradients of a row that several want are summed in
    it; empty bags fill up.

    Attributes:
        ids_K: int64, table after table.
        offsets: int64 (L * N + 1,), where in `ids_K` each bag begins.
        bags_K: int64, the bag in an array (N, L) of each id, in the order in which they came.
    """

    ids_K: Tensor
    offsets: Tensor
    bags_K: Tensor

    def picked(self, pooled_NW: Tensor, embedding_dim: int) -> Tensor:
        """Rows (K, D), in the order in which ids came, of all bags' (N, L * D)."""
        return pooled_NW.view(-1, embedding_dim).index_select(0, self.bags_K)

    def placed(self, gradient_KD: Tensor, shape: tuple[int, ...]) -> Tensor:
        """The gradients of all bags, in `shape` (N, L * D); zero for those that are empty."""
        gradient_NW = gradient_KD.new_zeros(shape)
        gradient_NW.view(-1, gradient_KD.shape[1]).index_copy_(0, self.bags_K, gradient_KD)
        return gradient_NW


def distinct_bags(ids_K: Int64s, counts_TL: Int64s) -> DistinctBags:
    """The bags of ids that come trainer after trainer, table after table.

    Args:
        ids_K: of all trainers.
        counts_TL: how many of them are of each trainer and table.
    """
    tables = counts_TL.shape[1]
    most = int(counts_TL.sum(0).max(initial=0))
    bags = DistinctBags(
        ids_K=torch.empty(len(ids_K), dtype=torch.int64),
        offsets=torch.empty(tables * most + 1, dtype=torch.int64),
        bags_K=torch.empty(len(ids_K), dtype=torch.int64),
    )
    lay_out(ids_K, counts_TL, bags.ids_K.numpy(), bags.offsets.numpy(), bags.bags_K.numpy())
    return bags
