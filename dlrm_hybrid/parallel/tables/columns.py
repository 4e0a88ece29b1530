"""Tables that columns share, wherever their rows are.

Shapes: B batch, F columns, D embedding dimension.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.types import BatchNumber, Version


@final
class ColumnTables(Tables):
    """One trainer's access to tables by columns, several of which may have the same table.

    Args:
        tables: access by table.
        columns: which column has which.
    """

    def __init__(self, tables: Tables, columns: ColumnBags) -> None:
        self._tables, self._columns = tables, columns
        self.remembered = tables.remembered

    @override
    def prefetch(self, batch: BatchNumber, bags: Bags[Tensor]) -> None:
        self._tables.prefetch(batch, self._columns.by_table(bags))

    @override
    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        pooled = yield from self._tables.lookup(batch, self._columns.by_table(bags), lr)
        return self._columns.by_column(pooled)

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        return self._tables.update(batch, self._columns.gradients(gradient_BFD))

    @override
    def begin_evaluation(self) -> None:
        self._tables.begin_evaluation()

    @override
    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        pooled = yield from self._tables.predict(self._columns.by_table(bags))
        return self._columns.by_column(pooled)

    @override
    def state_ahead(self) -> Program[list[Piece]]:
        return self._tables.state_ahead()

    @override
    def flush(self) -> Program[None]:
        return self._tables.flush()

    @override
    def settle(self) -> Program[None]:
        return self._tables.settle()

    @override
    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        self._tables.restart(version, values)
