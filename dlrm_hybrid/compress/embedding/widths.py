"""Widths of tables whose rows are in one array, as wide as the widest.

Inside a process rows of narrower tables end in zeros; storage and messages do without these.

Shapes: F tables, K rows of them, table after table; W width of the widest table of the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np

from dlrm_hybrid.arrays import Int64s

if TYPE_CHECKING:
    from torch import Tensor


@final
@dataclass(frozen=True, slots=True)
class Widths:
    """Widths of some tables of a model.

    Attributes:
        dims: width of each table.
        widest: W, that of the model's widest table, which need not be among them.
    """

    dims: tuple[int, ...]
    widest: int

    @property
    def is_uniform(self) -> bool:
        """Whether no row ends in zeros."""
        return all(dim == self.widest for dim in self.dims)

    @property
    def as_array(self) -> Int64s:
        """Width of each table, as an array."""
        return np.array(self.dims, np.int64)

    def of(self, tables: Iterable[int]) -> Widths:
        """Widths of some of these tables, in their order."""
        return Widths(tuple(self.dims[table] for table in tables), self.widest)

    def elements(self, counts_F: Int64s) -> int:
        """Number of elements of so many rows of each table, without the zeros."""
        return int((counts_F * self.as_array).sum())

    def mean_elements(self, rows: int) -> int:
        """Number of elements of so many rows that are spread evenly over the tables."""
        return rows * sum(self.dims) // max(len(self.dims), 1)

    def packed(self, rows_KW: Tensor, counts_F: Int64s) -> Tensor:
        """Elements of rows without the zeros; the rows themselves if there are none."""
        if self.is_uniform:
            return rows_KW
        return rows_KW.masked_select(self._mask(rows_KW, counts_F))

    def unpacked(self, elements: Tensor, counts_F: Int64s) -> Tensor:
        """Inverse of `packed`: rows (K, W)."""
        if self.is_uniform:
            return elements.view(-1, self.widest)
        mask_KW = self._mask(elements, counts_F)
        return elements.new_zeros(mask_KW.shape).masked_scatter(mask_KW, elements)

    def padded(self, pooled_BC: Tensor) -> Tensor:
        """Rows (B, F, W) of the tables whose columns `pooled_BC` has, one after the other."""
        if self.is_uniform:
            return pooled_BC.view(len(pooled_BC), len(self.dims), self.widest)
        mask_FW = self._mask(pooled_BC, np.ones(len(self.dims), np.int64))
        zeros_BFW = pooled_BC.new_zeros(len(pooled_BC), *mask_FW.shape)
        return zeros_BFW.masked_scatter(mask_FW, pooled_BC)

    def _mask(self, like: Tensor, counts_F: Int64s) -> Tensor:
        """Which elements of rows (K, W) are no such zeros, where another tensor is."""
        is_element_KW = np.arange(self.widest) < np.repeat(self.as_array, counts_F)[:, None]
        return like.new_tensor(is_element_KW).bool()
