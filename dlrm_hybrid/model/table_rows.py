"""The embedding rows that one table server owns, looked up and updated by distinct ids.

Server s of S owns the rows s, s + S, s + 2S … of every table, so popular ids, which have low
numbers, spread over all servers. Here a row has the number id // S.

Shapes: F tables, R rows of all, D embedding dimension, K ids, C numbers of state for each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Int64s
from dlrm_hybrid.kernels.rows import Gradients
from dlrm_hybrid.model.optimizer import STEP
from dlrm_hybrid.model.row_storage import IN_MEMORY, RowStorage
from dlrm_hybrid.model.rows.optimizer import UpdatedRows, row_keys
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.tables import Embedding
from dlrm_hybrid.model.tensors import Piece, TableInit, embedding_parts


class OwnedIds(NamedTuple):
    """The distinct ids of one trainer's batch that one server owns.

    Attributes:
        ids_K: as the server numbers its rows; table after table, increasing in each.
        counts_F: number of ids per table.
    """

    ids_K: Int64s
    counts_F: Int64s


def owned_rows(table_rows: Sequence[int], server: int, servers: int) -> tuple[int, ...]:
    """Number of rows of each table that a server owns; may be 0."""
    return tuple((rows - server + servers - 1) // servers for rows in table_rows)


@final
class TableRows:
    """The rows of one server, with their optimizer's state; both are initially 0.

    Args:
        spec: the tables.
        options: the optimizer.
        server: index of this server.
        servers: number of servers.
        storage: makes the tensors.
    """

    def __init__(
        self,
        spec: ModelShape,
        options: Embedding,
        server: int = 0,
        servers: int = 1,
        storage: RowStorage = IN_MEMORY,
    ) -> None:
        self.rows_F = owned_rows(spec.table_rows, server, servers)
        self.dim = spec.embedding_dim
        self._spec = spec
        self._storage = storage
        self._server, self._servers = server, servers
        self._rows = UpdatedRows(self.rows_F, self.dim, options, storage, spec.frozen)
        self._tables = [self._rows.tensors(table) for table in range(len(self.rows_F))]

    def draw(self, seed: int, init: TableInit = "uniform_rows") -> None:
        """Draw the values that rows have in any layout; see `draw_embeddings`."""
        for name, full, held in zip(
            self._spec.table_names, self._spec.table_rows, self._tables, strict=True
        ):
            own_RD, drawn = held["weight"], 0
            for part_RD in embedding_parts(f"{name}.weight", full, self.dim, seed, init):
                # The first row of the part has the number `drawn` in its table.
                mine_RD = part_RD[(self._server - drawn) % self._servers :: self._servers]
                first = -(-(drawn - self._server) // self._servers)
                own_RD[first : first + len(mine_RD)] = mine_RD
                drawn += len(part_RD)

    def look_up(self, asked: OwnedIds) -> Tensor:
        """Copy the rows (K, D) of some ids."""
        return self._storage.look_up(self._rows.weights_RD, torch.from_numpy(self._flat(asked)))

    def update(self, gradients: Sequence[tuple[OwnedIds, Tensor]], lr: float) -> None:
        """Update each row once by the sum of its gradients.

        Args:
            gradients: float32 (K, D) for distinct ids, per trainer in the order of summing.
            lr: learning rate.
        """
        rows_K = np.concatenate([self._flat(ids) for ids, _ in gradients])
        gradient_KD = torch.cat([gradient_KD for _, gradient_KD in gradients]).numpy()
        keys_K, shift = row_keys(rows_K, np.arange(len(rows_K)))
        if len(gradients) > 1:  # ids of one trainer come in order
            keys_K.sort()
        self._rows.update(Gradients(keys_K, shift, gradient_KD), lr)

    def pieces(self) -> list[Piece]:
        """Views of all rows and of their optimizer's state, by table, without empty ones."""
        found = [
            self._piece(table, kind, view)
            for table, held in enumerate(self._tables)
            for kind, view in held.items()
            if len(view)
        ]
        return sorted(found, key=lambda piece: not piece.name.endswith(".weight"))

    def _piece(self, table: int, kind: str, view: Tensor) -> Piece:
        name = f"{self._spec.table_names[table]}.{kind}"
        if kind == STEP:  # every server has it; one saves it
            return Piece(name=name, shape=(1,), begin=(0,), view=view, is_copy=self._server > 0)
        other = tuple(view.shape[1:])
        return Piece(
            name=name,
            shape=(self._spec.table_rows[table], *other),
            begin=(self._server, *(0 for _ in other)),
            view=view,
            every=self._servers,
        )

    def _flat(self, asked: OwnedIds) -> Int64s:
        return asked.ids_K + np.repeat(self._rows.starts_F, asked.counts_F)
