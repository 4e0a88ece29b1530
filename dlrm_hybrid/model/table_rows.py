"""The embedding rows that one table server owns, looked up and updated by distinct ids.

Server s of S owns the rows s, s + S, s + 2S … of every table, so popular ids, which have low
numbers, spread over all servers. Here a row has the number id // S, in ids too.

Shapes: F tables, D width of the widest (see `Widths`), K ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.kernels.rows import Gradients
from dlrm_hybrid.model.optimizer import STEP
from dlrm_hybrid.model.row_storage import IN_MEMORY, RowStorage
from dlrm_hybrid.model.rows.optimizer import UpdatedRows, row_keys
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.tables import Embedding
from dlrm_hybrid.model.tensors import Piece, TableInit, embedding_parts
from dlrm_hybrid.types import Group


def owned_rows(table_rows: Sequence[int], server: int, servers: int) -> tuple[int, ...]:
    """Number of rows of each table that a server owns; may be 0."""
    return tuple((rows - server + servers - 1) // servers for rows in table_rows)


@final
class _Part:
    """The rows of the tables of one width, among all tables."""

    def __init__(
        self,
        dim: int,
        dims_F: Sequence[int],
        rows_F: Sequence[int],
        options: Embedding,
        storage: RowStorage,
        frozen: Sequence[bool],
    ) -> None:
        self.dim = dim
        self._is_mine_F = np.array(dims_F) == dim
        # Others have no rows here, so tables keep their numbers.
        sizes = [rows if width == dim else 0 for rows, width in zip(rows_F, dims_F, strict=True)]
        self.rows = UpdatedRows(sizes, dim, options, storage, frozen)

    def tensors(self) -> dict[int, dict[str, Tensor]]:
        return {table: self.rows.tensors(table) for table in self._is_mine_F.nonzero()[0].tolist()}

    def mine(self, ids: Rows) -> Int64s:
        """Positions of the ids that are of these tables."""
        return np.flatnonzero(np.repeat(self._is_mine_F, ids.counts_L))

    def flat(self, ids: Rows) -> Int64s:
        """Numbers of ids among all rows here; without meaning for ids of other tables."""
        return ids.ids_K + np.repeat(self.rows.starts_F, ids.counts_L)


@final
class TableRows:
    """The rows of one server, with their optimizer's state; both are initially 0."""

    def __init__(
        self,
        spec: ModelShape,
        options: Embedding,
        server: int = 0,
        servers: int = 1,
        storage: RowStorage = IN_MEMORY,
    ) -> None:
        self.rows_F = owned_rows(spec.table_rows, server, servers)
        self.widths = spec.widths
        self._spec = spec
        self._storage = storage
        self._server, self._servers = server, servers
        dims = self.widths.dims
        self._parts = [
            _Part(dim, dims, self.rows_F, options, storage, spec.frozen)
            for dim in dict.fromkeys(dims)
        ]
        tables = {table: views for part in self._parts for table, views in part.tensors().items()}
        self._tables = [tables[table] for table in range(len(self.rows_F))]

    def draw(self, seed: int, init: TableInit = "uniform_rows") -> None:
        """Draw the values that rows have in any layout; see `draw_embeddings`."""
        sizes = zip(self._spec.table_rows, self.widths.dims, strict=True)
        for name, size, tensors in zip(self._spec.table_names, sizes, self._tables, strict=True):
            weight_RD, begin = tensors["weight"], 0
            for part_RD in embedding_parts(f"{name}.weight", *size, seed, init):
                # The first row of the part has the number `begin` in its table.
                rows_RD = part_RD[(self._server - begin) % self._servers :: self._servers]
                first = -(-(begin - self._server) // self._servers)
                weight_RD[first : first + len(rows_RD)] = rows_RD
                begin += len(part_RD)

    def look_up(self, ids: Rows) -> Tensor:
        """Copy the rows (K, D) of some ids."""
        if len(self._parts) == 1:
            (part,) = self._parts
            return self._storage.look_up(part.rows.weights_RD, torch.from_numpy(part.flat(ids)))
        rows_KD = torch.zeros(len(ids.ids_K), self.widths.widest)
        for part in self._parts:
            place_K = torch.from_numpy(part.mine(ids))
            rows_K = torch.from_numpy(part.flat(ids)).index_select(0, place_K)
            rows_KD[place_K, : part.dim] = self._storage.look_up(part.rows.weights_RD, rows_K)
        return rows_KD

    def update(self, gradients: Sequence[tuple[Rows, Tensor]], lr: float) -> None:
        """Update each row once by the sum of its gradients.

        Args:
            gradients: float32 (K, D) for distinct ids, per trainer in the order of summing.
        """
        for part in self._parts:
            rows_K = np.concatenate([part.flat(ids) for ids, _ in gradients])
            gradient_KD = torch.cat([gradient_KD for _, gradient_KD in gradients]).numpy()
            if len(self._parts) > 1:
                ends = np.cumsum([0, *(len(ids.ids_K) for ids, _ in gradients)])
                place_K = np.concatenate(
                    [part.mine(ids) + end for (ids, _), end in zip(gradients, ends, strict=False)]
                )
                rows_K = rows_K[place_K]
                gradient_KD = np.ascontiguousarray(gradient_KD[place_K, : part.dim])
            keys_K, shift = row_keys(rows_K, np.arange(len(rows_K)))
            if len(gradients) > 1:  # ids of one trainer come in order
                keys_K.sort()
            part.rows.update(Gradients(keys_K, shift, gradient_KD), lr)

    def pieces(self) -> list[Piece]:
        """Views of all rows and of their optimizer's state, by table, without empty ones."""
        pieces = [
            self._piece(table, kind, view)
            for table, tensors in enumerate(self._tables)
            for kind, view in tensors.items()
            if len(view)
        ]
        return sorted(pieces, key=lambda piece: not piece.name.endswith(".weight"))

    def _piece(self, table: int, kind: str, view: Tensor) -> Piece:
        name, group = f"{self._spec.table_names[table]}.{kind}", Group.EMBEDDINGS
        if kind == STEP:  # every server has it; one saves it
            is_copy = self._server > 0
            return Piece(name=name, shape=(1,), begin=(0,), view=view, group=group, is_copy=is_copy)
        columns = tuple(view.shape[1:])
        return Piece(
            name=name,
            shape=(self._spec.table_rows[table], *columns),
            begin=(self._server, *(0 for _ in columns)),
            view=view,
            group=group,
            every=self._servers,
        )
