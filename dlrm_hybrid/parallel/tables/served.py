"""Tables of which a trainer has nothing: table servers look up and update their rows.

    prefetch   the distinct ids of a batch      LOOKUP  →
    lookup     waits for their rows                     ←  ROWS
    update     ids, and sums of their gradients UPDATE  →

Shapes: B batch, F tables, D embedding dimension, K distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.model.sharding import CommPrecision, casts
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.table_rows import owned_rows
from dlrm_hybrid.parallel.boundaries import EVALUATION
from dlrm_hybrid.parallel.effects import Port, Program
from dlrm_hybrid.parallel.finite import LOOKUPS_PREFIX
from dlrm_hybrid.parallel.tables.base import Tables, mean_part
from dlrm_hybrid.parallel.tables.lookups import (
    SplitIds,
    id_sections,
    split_ids,
    value_section,
    values_of,
)
from dlrm_hybrid.parallel.tables.table_server import FLOAT_BYTES
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber, DlrmError, Version
from dlrm_hybrid.wire.frame import Kind

ID_BYTES = 4


@dataclass(slots=True, eq=False)
class _Flying:
    """A batch between `prefetch` and `update`; its rows (B, F, D) once they have come."""

    split: SplitIds
    pooled_BFD: Tensor | None


@final
class ServedTables(Tables):
    """One trainer's access to tables on table servers.

    A batch is updated before the next one is looked up: schedules with delays need more.

    Args:
        port: of the worker.
        spec: the tables.
        precision: of rows and gradients on the wire.
        averaged: over how many trainers' losses an update takes the mean.
        clock: measures its own part of the work.
    """

    def __init__(
        self,
        port: Port,
        spec: ModelSpec,
        precision: CommPrecision,
        averaged: int,
        clock: SpanClock,
    ) -> None:
        self._port = port
        self._servers = port.topology.table_server_group
        self._rows = [
            np.array(owned_rows(spec.table_rows, index, len(self._servers)), np.int64)
            for index in range(len(self._servers))
        ]
        self._tables, self._dim = len(spec.table_rows), spec.embedding_dim
        self._row_cast, self._gradient_cast = casts(precision)
        self._averaged = averaged
        self._looking_up = clock.within(Span.EMBEDDING)
        self._prefix = f"{LOOKUPS_PREFIX}{port.rank // port.topology.stages}."
        self._flying: dict[BatchNumber, _Flying] = {}
        self._loaded: dict[BatchNumber, Tensor] = {}
        self._updated = 0

    @override
    def prefetch(self, batch: BatchNumber, ids_FB: Tensor) -> None:
        if batch in self._flying:
            return
        with self._looking_up:
            split = split_ids(ids_FB, len(self._servers))
            pooled_BFD = self._loaded.pop(batch, None)
            self._flying[batch] = _Flying(split, pooled_BFD)
            if pooled_BFD is None:
                self._ask(split, batch, 0)

    @override
    def lookup(self, batch: BatchNumber, ids_FB: Tensor, lr: float) -> Program[Tensor]:
        self.prefetch(batch, ids_FB)
        flying = self._flying[batch]
        if flying.pooled_BFD is None:
            return (yield from self._receive(flying.split, batch, 0))
        pooled_BFD, flying.pooled_BFD = flying.pooled_BFD, None
        return pooled_BFD

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        yield from ()
        with self._looking_up:
            split = self._flying.pop(batch).split
            sum_KD = split.ids.sum_by_id(mean_part(gradient_BFD, self._averaged))
            for server, asked in enumerate(split.asked):
                values = value_section(split.part(sum_KD, server), self._gradient_cast)
                sections = (*id_sections(asked, self._rows[server]), values)
                dense_bytes = FLOAT_BYTES * self._dim * asked.lookups
                to = self._servers[server]
                self._port.send(to, Kind.UPDATE, batch, sections, dense_bytes=dense_bytes)
        self._updated = batch + 1

    @override
    def predict(self, ids_FB: Tensor) -> Program[Tensor]:
        if ids_FB.numel() == 0:
            return ids_FB.new_empty(0, len(ids_FB), self._dim).float()
        with self._looking_up:
            split = split_ids(ids_FB, len(self._servers))
            self._ask(split, self._updated, EVALUATION)
        return (yield from self._receive(split, self._updated, EVALUATION))

    @override
    def state_ahead(self) -> Program[dict[str, Tensor]]:
        # By how many batches they are ahead: the tables will be of newer versions.
        held: dict[str, Tensor] = {}
        for batch, flying in self._flying.items():
            if flying.pooled_BFD is None:
                flying.pooled_BFD = yield from self._receive(flying.split, batch, 0)
            held[f"{self._prefix}{batch - self._updated}"] = flying.pooled_BFD
        return held

    @override
    def settle(self) -> Program[None]:
        for batch, flying in self._flying.items():
            if flying.pooled_BFD is None:
                yield from self._receive(flying.split, batch, 0)
        self._flying.clear()
        self._loaded.clear()
        # Table servers take the messages of a rank in their order: they answer this one last.
        nothing = split_ids(torch.empty(self._tables, 0, dtype=torch.int64), len(self._servers))
        self._ask(nothing, self._updated, EVALUATION)
        yield from self._receive(nothing, self._updated, EVALUATION)

    @override
    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        head = self._prefix
        self._updated = version
        self._flying.clear()
        self._loaded = {
            BatchNumber(version + int(name.removeprefix(head))): rows
            for name, rows in values.items()
            if name.startswith(head)
        }

    def _ask(self, split: SplitIds, number: int, microbatch: int) -> None:
        for server, asked in enumerate(split.asked):
            self._port.send(
                self._servers[server],
                Kind.LOOKUP,
                number,
                id_sections(asked, self._rows[server]),
                microbatch=microbatch,
                dense_bytes=ID_BYTES * asked.lookups,
            )

    def _receive(self, split: SplitIds, number: int, microbatch: int) -> Program[Tensor]:
        parts: list[Tensor] = []
        for server, asked in zip(self._servers, split.asked, strict=True):
            frame = yield Receive(Kind.ROWS, server, number, microbatch=microbatch)
            what = f"rows {number} of rank {server}"
            if len(frame.sections) != 1:
                raise DlrmError(f"{what}: {len(frame.sections)} sections, expected 1")
            shape = (len(asked.ids.ids_K), self._dim)
            parts.append(values_of(frame.sections[0], self._row_cast, shape, what))
        with self._looking_up:
            return split.ids.expand(split.joined(parts))
