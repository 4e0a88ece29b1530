"""Tables held by table servers alone, which look up and update their rows.

    prefetch   the distinct ids of a batch      LOOKUP  →
    lookup     waits for their rows                     ←  ROWS
    update     ids, and sums of their gradients UPDATE  →

Shapes: B batch, F tables, D width of the widest (see `Widths`), K distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.embedding.ends import RowFormats
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.model.embeddings import DistinctIds
from dlrm_hybrid.model.rows.optimizer import learning
from dlrm_hybrid.model.spec import ModelShape
from dlrm_hybrid.model.table_rows import owned_rows
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.effects import Port, Program
from dlrm_hybrid.parallel.finite import LOOKUPS_PREFIX
from dlrm_hybrid.parallel.tables.base import Tables, mean_part
from dlrm_hybrid.parallel.tables.lookups import (
    SplitIds,
    held_by,
    id_sections,
    message_of,
    number_section,
    split_batch,
)
from dlrm_hybrid.parallel.tables.table_server import FLOAT_BYTES
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber, DataError, DlrmError, Group, Version
from dlrm_hybrid.wire.frame import EVALUATION, Kind
from dlrm_hybrid.wire.section import blamed

ID_BYTES = 4


@final
class TableClient:
    """Exchanges one worker's lookups, rows and updates with the table servers.

    Args:
        port: port of the worker.
        spec: the tables.
        formats: formats of rows and gradients on the wire.
        clock: measures looking up.
    """

    def __init__(self, port: Port, spec: ModelShape, formats: RowFormats, clock: SpanClock) -> None:
        self._port = port
        self._group = port.topology.table_server_group
        servers, trainer = len(self._group), port.rank // port.topology.stages
        held = [
            held_by(server, owned_rows(spec.table_rows, server, servers), spec.widths)
            for server in range(servers)
        ]
        self._rows = [np.array(part.rows_L, np.int64) for part in held]
        self._end, self._exact = (one.trainer(trainer, held) for one in formats)
        self.table_rows = np.array(spec.table_rows, np.int64)
        self._learns_F = learning(spec.frozen, len(spec.table_rows))
        self.nothing = Bags(torch.empty(len(spec.table_rows), 0, dtype=torch.int64))
        self._widths = spec.widths
        self.dim = self._widths.widest
        self.looking_up = clock.within(Span.EMBEDDING)
        self.prefix = f"{LOOKUPS_PREFIX}{trainer}."

    @property
    def servers(self) -> int:
        """Number of table servers."""
        return len(self._group)

    def ask(self, split: SplitIds, number: int, microbatch: int = 0) -> None:
        """Request a batch's rows from each server, or with EVALUATION rows of a version."""
        for to, asked, rows_F in zip(self._group, split.asked, self._rows, strict=True):
            sections, dense_bytes = id_sections(asked, rows_F), ID_BYTES * asked.lookups
            self._port.send(
                to, Kind.LOOKUP, number, sections, microbatch=microbatch, dense_bytes=dense_bytes
            )

    def receive(self, split: SplitIds, number: int, microbatch: int = 0) -> Program[Tensor]:
        """Receive the rows (K, D) that `ask` has requested."""
        end = self._exact if microbatch else self._end
        parts: list[Tensor] = []
        for place, (server, asked) in enumerate(zip(self._group, split.asked, strict=True)):
            frame = yield Receive(Kind.ROWS, server, number, microbatch=microbatch)
            what = f"rows {number} of rank {server}"
            if len(frame.sections) != 1:
                raise DlrmError(f"{what}: {len(frame.sections)} sections, expected 1")
            with self.looking_up, blamed(what):
                rows, message = asked.ids, message_of(frame.sections[0], end.dtype)
                values_KD = end.take(place, rows, end.read(place, rows, message))
            parts.append(torch.from_numpy(values_KD))
        with self.looking_up:
            return split.joined(parts)

    def update(self, split: SplitIds, batch: BatchNumber, sum_KD: Tensor) -> None:
        """Send the sums of gradients of a batch, but for those of frozen tables."""
        sent: list[Rows] = []
        sums: list[Float32s] = []
        for server, asked in enumerate(split.asked):
            rows, some_K = asked.ids.of_tables(self._learns_F)
            sent.append(rows)
            sums.append(split.part(sum_KD, server).numpy()[some_K])
        for place, rounded_KD in enumerate(self._end.round(sent, sums)):
            rows, asked = sent[place], split.asked[place]
            values = number_section(self._end.encode(place, rows, rounded_KD), self._end.dtype)
            asked = asked._replace(ids=rows)
            sections = (*id_sections(asked, self._rows[place]), values)
            dense_bytes = FLOAT_BYTES * self._widths.mean_elements(asked.lookups)
            to = self._group[place]
            self._port.send(to, Kind.UPDATE, batch, sections, dense_bytes=dense_bytes)

    def predict(self, bags: Bags[Tensor], updated: int) -> Program[Tensor]:
        """Look up pooled rows (B, F, D) once `updated` batches are applied; no update follows."""
        if not bags.rows:
            return torch.empty(0, bags.tables, self.dim)
        with self.looking_up:
            ids, split = split_batch(bags, self.servers)
            self.ask(split, updated, EVALUATION)
        rows_KD = yield from self.receive(split, updated, EVALUATION)
        with self.looking_up:
            return ids.pool(rows_KD)

    def settle(self, updated: int) -> Program[None]:
        """Wait until the updates of `updated` batches have arrived."""
        # Table servers handle a rank's messages in order: they answer this one last.
        _, split = split_batch(self.nothing, self.servers)
        self.ask(split, updated, EVALUATION)
        yield from self.receive(split, updated, EVALUATION)


@dataclass(slots=True, eq=False)
class _Flying:
    """A batch between `prefetch` and `update`, with its rows (B, F, D) once they arrive."""

    ids: DistinctIds
    split: SplitIds
    pooled_BFD: Tensor | None


@final
class ServedTables(Tables):
    """One trainer's access to tables on table servers.

    A batch is updated before the next one is looked up: schedules with delays need more.

    Args:
        client: messages of the worker.
        averaged: number of trainers whose losses an update averages.
    """

    def __init__(self, client: TableClient, averaged: int) -> None:
        self._client = client
        self._averaged = averaged
        self._flying: dict[BatchNumber, _Flying] = {}
        self._loaded: dict[BatchNumber, Tensor] = {}
        self._updated = 0

    @override
    def prefetch(self, batch: BatchNumber, bags: Bags[Tensor]) -> None:
        if batch in self._flying:
            return
        with self._client.looking_up:
            ids, split = split_batch(bags, self._client.servers)
            pooled_BFD = self._loaded.pop(batch, None)
            fit = (bags.rows, bags.tables, self._client.dim)
            if pooled_BFD is not None and pooled_BFD.shape != fit:
                raise DataError(
                    f"{self._client.prefix}*: {list(pooled_BFD.shape)} for batch {batch}, it must "
                    f"be {list(fit)}"
                )
            self._flying[batch] = _Flying(ids, split, pooled_BFD)
            if pooled_BFD is None:
                self._client.ask(split, batch)

    @override
    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        self.prefetch(batch, bags)
        flying = self._flying[batch]
        if flying.pooled_BFD is None:
            return (yield from self._receive(flying, batch))
        pooled_BFD, flying.pooled_BFD = flying.pooled_BFD, None
        return pooled_BFD

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        yield from ()
        with self._client.looking_up:
            flying = self._flying.pop(batch)
            sum_KD = flying.ids.sum_by_id(mean_part(gradient_BFD, self._averaged))
            self._client.update(flying.split, batch, sum_KD)
        self._updated = batch + 1

    @override
    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        return self._client.predict(bags, self._updated)

    @override
    def state_ahead(self) -> Program[list[Piece]]:
        # Relative to the current batch: the tables will have newer versions.
        rows: dict[str, Tensor] = {}
        for batch, flying in self._flying.items():
            if flying.pooled_BFD is None:
                flying.pooled_BFD = yield from self._receive(flying, batch)
            rows[f"{self._client.prefix}{batch - self._updated}"] = flying.pooled_BFD
        return full_pieces(rows, Group.LOOKUPS)

    @override
    def settle(self) -> Program[None]:
        for batch, flying in self._flying.items():
            if flying.pooled_BFD is None:
                yield from self._receive(flying, batch)
        self._flying.clear()
        self._loaded.clear()
        yield from self._client.settle(self._updated)

    @override
    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        head = self._client.prefix
        self._updated = version
        self._flying.clear()
        self._loaded = {
            BatchNumber(version + int(ahead)): rows
            for name, rows in values.items()
            if name.startswith(head) and (ahead := name.removeprefix(head)).isdecimal()
        }

    def _receive(self, flying: _Flying, batch: BatchNumber) -> Program[Tensor]:
        rows_KD = yield from self._client.receive(flying.split, batch)
        with self._client.looking_up:
            return flying.ids.pool(rows_KD)
