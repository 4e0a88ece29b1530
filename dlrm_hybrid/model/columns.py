"""Columns that share tables: a table with several columns is looked up as one with more bags.

A table's bags are those of its first column, then those of its second, as many for every table as
for the one with most columns; the bags that others lack are empty. So what holds tables knows no
columns, and a row that several columns have looked up is updated once, by the sum of all gradients.
If each column has a table of its own, all stays as it is.

Shapes: B rows of a batch, C columns, F tables, D embedding dimension; N bags of each table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags, in_order, jagged, lengths_of
from dlrm_hybrid.model.embeddings import require_ids_on_cpu, tensor_bags
from dlrm_hybrid.model.placement import HOST
from dlrm_hybrid.model.spec import ModelShape


@final
class ColumnBags:
    """Turns bags of columns into bags of tables, and rows of tables into rows of columns.

    Args:
        device: where the rows of the tables are; ids are on the host.

    Attributes:
        most: number of columns of the table with most; N = most * B.
    """

    def __init__(self, table_of_column: Sequence[int], device: torch.device = HOST.device) -> None:
        self._tables_C = np.array(table_of_column, np.int64)
        counts_F = np.bincount(self._tables_C)
        self.most, self._tables = int(counts_F.max()), len(counts_F)
        self._order_C = np.argsort(self._tables_C, kind="stable")
        firsts_F = np.cumsum(counts_F) - counts_F
        self._among_C = np.empty_like(self._tables_C)  # place in its table, from 0
        self._among_C[self._order_C] = np.arange(len(self._tables_C)) - np.repeat(
            firsts_F, counts_F
        )
        places_C = self._among_C * self._tables + self._tables_C
        self._places_C = torch.from_numpy(places_C).to(device)

    @classmethod
    def of(cls, spec: ModelShape, device: torch.device = HOST.device) -> ColumnBags:
        """The `ColumnBags` of a model."""
        return cls(spec.columns, device)

    def by_table(self, bags: Bags[Tensor]) -> Bags[Tensor]:
        """The bags of the tables, from the bags of the columns; ValueError if they do not fit."""
        if self.most == 1:
            return bags
        arrays = require_ids_on_cpu(bags).map(Tensor.numpy)
        lengths_FXB = np.zeros((self._tables, self.most, bags.rows), np.int64)
        lengths_FXB[self._tables_C, self._among_C] = lengths_of(arrays)
        ordered, lengths_FN = in_order(arrays, self._order_C), lengths_FXB.reshape(self._tables, -1)
        return tensor_bags(
            jagged(ordered.values.reshape(-1), lengths_FN, weights_N=ordered.weights)
        )

    def by_column(self, pooled_NFD: Tensor) -> Tensor:
        """The pooled rows of the columns (B, C, D), from the pooled rows of the tables' bags."""
        if self.most == 1:
            return pooled_NFD
        tables, dim = pooled_NFD.shape[1:]
        rows = len(pooled_NFD) // self.most
        by_place = pooled_NFD.view(self.most, rows, tables, dim).transpose(1, 2)
        by_place = by_place.reshape(self.most * tables, rows, dim)
        return by_place.index_select(0, self._places_C).transpose(0, 1).contiguous()

    def gradients(self, gradient_BCD: Tensor) -> Tensor:
        """The gradients of the tables' bags (N, F, D), from the gradients of the columns' rows."""
        if self.most == 1:
            return gradient_BCD
        rows, _, dim = gradient_BCD.shape
        by_place = gradient_BCD.new_zeros(self.most * self._tables, rows, dim)
        by_place.index_copy_(0, self._places_C, gradient_BCD.transpose(0, 1))
        by_table = by_place.view(self.most, self._tables, rows, dim).transpose(1, 2)
        return by_table.reshape(self.most * rows, self._tables, dim)
