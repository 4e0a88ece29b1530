"""Exchange of the ids of all bags, to the trainers that look them up.

TorchRec's own input distribution is made for bags of any size: it sends splits, lengths and ids in
three collectives, and regroups them by feature. If every bag has one id, one collective of ids is
enough, else one of lengths and one of ids, and one of their weights if they have any. TorchRec
returns the pooled rows.

Shapes: B rows of this trainer's batch, F tables, T trainers, L tables that one trainer looks up, N
rows of all trainers' batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.bags import Bags, in_order, jagged, joined, lengths_of, table_offsets
from dlrm_hybrid.comm.group import CountedGroup, split
from dlrm_hybrid.model.embeddings import require_ids_on_cpu
from dlrm_hybrid.model.sharding import Routes
from dlrm_hybrid.types import DlrmError

WIRE_DTYPE = torch.int32
Asked = tuple[Tensor, Tensor, Tensor | None]
"""Ids, offsets and weights of a lookup, as `TableKernel` takes them."""


@final
class IdExchange:
    """Sends ids to the trainers that look them up."""

    def __init__(self, routes: Routes, group: CountedGroup) -> None:
        self._group = group
        self._rank = group.rank()
        self._num_features_L = routes.num_features_L
        self._blocks_L = [
            None if not blocks else torch.tensor(blocks).t().unsqueeze(2)
            for blocks in routes.blocks_L
        ]
        self._offsets = torch.arange(1)
        self._features_T = [len(tables) for tables in routes.wanted_T]
        self._order = torch.tensor([table for tables in routes.wanted_T for table in tables])

    def __call__(self, bags: Bags[Tensor], rows_T: Sequence[int]) -> list[Asked]:
        """Exchange ids; returns, for each lookup, the ids of all trainers' batches, concatenated.

        Args:
            bags: bags of this trainer's batch, weighted on all trainers or none; ids are valid.

        Returns:
            Per lookup, as FBGEMM takes them: the ids held here, int64, the begin of each feature's
            and row's bag in them, int64 (features * N + 1,), and their weights if they have any.

        Raises:
            DlrmError: a trainer sent invalid bags.
        """
        if bags.offsets is not None:
            return self._of_jagged(bags.map(Tensor.numpy), rows_T)
        ids_LB = bags.values.to(WIRE_DTYPE).index_select(0, self._order)
        count, num_rows = self._features_T[self._rank], rows_T[self._rank]
        ids = self._group.exchange(
            ids_LB.view(-1),
            [features * num_rows for features in self._features_T],
            [count * rows for rows in rows_T],
        )
        parts = split(ids, [count * rows for rows in rows_T])
        ids_LN = torch.cat(
            [part.view(count, rows) for part, rows in zip(parts, rows_T, strict=True)], 1
        )
        parts_LN = split(ids_LN, self._num_features_L)
        return [
            self._dense_bags(part_LN) if blocks is None else _block_bags(part_LN, *blocks)
            for part_LN, blocks in zip(parts_LN, self._blocks_L, strict=True)
        ]

    def _of_jagged(self, bags: Bags[Int64s], rows_T: Sequence[int]) -> list[Asked]:
        """Exchange lengths of bags before the ids, whose number the holder of a table needs."""
        bags = in_order(bags, self._order.numpy())
        count, num_rows = self._features_T[self._rank], rows_T[self._rank]
        lengths = self._group.exchange(
            torch.from_numpy(lengths_of(bags).reshape(-1)).to(WIRE_DTYPE),
            [features * num_rows for features in self._features_T],
            [count * rows for rows in rows_T],
        )
        lengths_T = [part.long() for part in split(lengths, [count * rows for rows in rows_T])]
        for trainer, length_N in enumerate(lengths_T):
            if (length_N < 0).any():
                raise DlrmError(f"trainer {trainer} sent bags of fewer ids than none")
        counts_T = [int(length_N.sum()) for length_N in lengths_T]
        ends = table_offsets(bags)[np.cumsum([0, *self._features_T])]
        sizes_T = np.diff(ends).tolist()
        ids_N = torch.from_numpy(bags.values).to(WIRE_DTYPE)
        ids = self._group.exchange(ids_N, sizes_T, counts_T)
        weights_T: list[Any] = [None] * len(counts_T)
        if bags.weights is not None:
            weights = self._group.exchange(torch.from_numpy(bags.weights), sizes_T, counts_T)
            weights_T = [part.numpy() for part in split(weights, counts_T)]
        parts = zip(split(ids.long(), counts_T), lengths_T, rows_T, weights_T, strict=True)
        merged = joined(
            [
                jagged(part.numpy(), length_N.view(count, rows).numpy(), (), weights_N)
                for part, length_N, rows, weights_N in parts
            ]
        )
        lookups_L = np.split(np.arange(count), np.cumsum(self._num_features_L)[:-1])
        return [
            _jagged_bags(in_order(merged, tables), blocks)
            for tables, blocks in zip(lookups_L, self._blocks_L, strict=True)
        ]

    def _dense_bags(self, ids_LN: Tensor) -> Asked:
        num_ids = ids_LN.numel()
        if len(self._offsets) <= num_ids:
            self._offsets = torch.arange(num_ids + 1)
        return ids_LN.reshape(-1).long(), self._offsets[: num_ids + 1], None


def _block_bags(ids_LN: Tensor, first_L1: Tensor, stop_L1: Tensor) -> Asked:
    """Make bags of a block's ids, empty for ids of other blocks, whose owners add the rows."""
    here_LN = (ids_LN >= first_L1).logical_and_(ids_LN < stop_L1)
    offsets = torch.zeros(ids_LN.numel() + 1, dtype=torch.int64)
    torch.cumsum(here_LN.view(-1), 0, out=offsets[1:])
    return (ids_LN - first_L1)[here_LN], offsets, None


def _jagged_bags(bags: Bags[Int64s], blocks_2L1: Tensor | None) -> Asked:
    """Make bags, as `_dense_bags` and `_block_bags`, of the ids whose rows are held here."""
    values_N, offsets, weights_N = bags.values, bags.offsets, bags.weights
    assert offsets is not None
    if blocks_2L1 is not None:
        counts_L = np.diff(table_offsets(bags))
        first_N, stop_N = np.repeat(blocks_2L1.squeeze(2).numpy(), counts_L, axis=1)
        here_N = (values_N >= first_N) & (values_N < stop_N)
        offsets = np.concatenate([[0], np.cumsum(here_N)])[offsets]
        values_N = (values_N - first_N)[here_N]
        weights_N = None if weights_N is None else weights_N[here_N]
    weights = None if weights_N is None else torch.from_numpy(weights_N)
    return torch.from_numpy(values_N), torch.from_numpy(offsets), weights


def check_ids(bags: Bags[Tensor], table_rows_F1: Tensor) -> None:
    """Refuse ids outside their tables: FBGEMM would end the process of another trainer."""
    ids, rows = require_ids_on_cpu(bags).values, table_rows_F1
    if bags.offsets is not None:
        counts_F = np.diff(table_offsets(bags.map(Tensor.numpy)))
        rows = table_rows_F1.flatten().repeat_interleave(torch.from_numpy(counts_F))
    is_bad = (ids < 0).logical_or_(ids >= rows)
    if is_bad.any():
        place = int(is_bad.flatten().nonzero()[0])
        starts = table_offsets(bags.map(Tensor.numpy))
        table = int(np.searchsorted(starts, place, side="right")) - 1
        raise RuntimeError(
            f"id {ids.flatten()[place]} is out of bounds: embedding.{table + 1} has num_rows = "
            f"{table_rows_F1[table].item()}"
        )
