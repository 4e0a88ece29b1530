"""Tables held by table servers alone, which look up and update their rows.

    prefetch   the distinct ids of a batch      LOOKUP  →
    lookup     waits for their rows                     ←  ROWS
    update     ids, and sums of their gradients UPDATE  →

Shapes: B batch, F tables, S servers, D width of the widest (see `Widths`), K distinct ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.embedding.ends import Read, RowFormats, TrainerEnd
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
    AskedIds,
    SplitIds,
    ahead_of,
    flight_tensors,
    flights_of,
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


@dataclass(slots=True, eq=False)
class _Flight:
    """A batch between `ask` and `receive`: rows by server, and what has been read of them."""

    rows_S: Sequence[Rows]
    reads: Sequence[Read] | None = None
    split: SplitIds | None = None


@final
class TableClient:
    """Exchanges one worker's lookups, rows and updates with the table servers.

    Rows that have come are read in the order of batches, and taken when a batch is looked up: so
    an update finds what is remembered of rows as it would if none had been asked for ahead.

    Attributes:
        remembered: compression state of exchanged rows.
        updated: number of batches whose updates have been sent.
    """

    def __init__(self, port: Port, spec: ModelShape, formats: RowFormats, clock: SpanClock) -> None:
        self._port = port
        self._group = port.topology.table_server_group
        servers = len(self._group)
        self._trainer = trainer = port.rank // port.topology.stages
        self._held_S = [
            held_by(server, owned_rows(spec.table_rows, server, servers), spec.widths)
            for server in range(servers)
        ]
        self._rows_S = [np.array(held.rows_L, np.int64) for held in self._held_S]
        self.remembered, self._exact = (one.trainer(trainer, self._held_S) for one in formats)
        self.table_rows = np.array(spec.table_rows, np.int64)
        self._learns_F = learning(spec.frozen, len(spec.table_rows))
        self.nothing = Bags(torch.empty(len(spec.table_rows), 0, dtype=torch.int64))
        self._widths = spec.widths
        self.dim = self._widths.widest
        self.looking_up = clock.within(Span.EMBEDDING)
        self.prefix = f"{LOOKUPS_PREFIX}{trainer}."
        self._flights: dict[BatchNumber, _Flight] = {}
        self.updated = 0

    @property
    def servers(self) -> int:
        """Number of table servers."""
        return len(self._group)

    def ask(self, batch: BatchNumber, split: SplitIds) -> None:
        """Request a batch's rows from each server, unless a checkpoint had them.

        Raises:
            DataError: the checkpoint had other rows.
        """
        rows_S = [asked.ids for asked in split.asked]
        flight = self._flights.setdefault(batch, _Flight(rows_S))
        flight.split = split
        if flight.reads is None:
            self._send(split, batch)
            return
        pairs = zip(flight.rows_S, rows_S, strict=True)
        if not all(np.array_equal(saved.ids_K, rows.ids_K) for saved, rows in pairs):
            raise DataError(f"{self.prefix}ahead: other rows than those of batch {batch}")

    def receive(self, batch: BatchNumber) -> Program[Tensor]:
        """Take the rows (K, D) that `ask` has requested."""
        split = self._flights[batch].split
        assert split is not None
        parts = yield from self._take(batch)
        with self.looking_up:
            return split.joined(parts)

    def update(self, split: SplitIds, batch: BatchNumber, sum_KD: Tensor) -> None:
        """Send the sums of gradients of a batch, but for those of frozen tables."""
        sent: list[AskedIds] = []
        sums: list[Float32s] = []
        for server, asked in enumerate(split.asked):
            rows, some_K = asked.ids.of_tables(self._learns_F)
            sent.append(asked._replace(ids=rows))
            sums.append(split.part(sum_KD, server).numpy()[some_K])
        end = self.remembered
        rounded_S = end.round([asked.ids for asked in sent], sums)
        for server, (asked, rounded_KD) in enumerate(zip(sent, rounded_S, strict=True)):
            values = number_section(end.encode(server, asked.ids, rounded_KD), end.dtype)
            sections = (*id_sections(asked, self._rows_S[server]), values)
            dense_bytes = FLOAT_BYTES * self._widths.mean_elements(asked.lookups)
            to = self._group[server]
            self._port.send(to, Kind.UPDATE, batch, sections, dense_bytes=dense_bytes)
        self.updated = batch + 1

    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        """Look up pooled rows (B, F, D) once all updates are applied; no update follows."""
        if not bags.rows:
            return torch.empty(0, bags.tables, self.dim)
        with self.looking_up:
            ids, split = split_batch(bags, self.servers)
        rows_KD = yield from self._look_up(split)
        with self.looking_up:
            return ids.pool(rows_KD)

    def state_ahead(self) -> Program[list[Piece]]:
        """Compression state, and rows asked for ahead of the updates; waits for them."""
        ahead: dict[str, Tensor] = {}
        for batch, flight in self._flights.items():
            reads = yield from self._read(batch, flight)
            for server, (rows, read) in enumerate(zip(flight.rows_S, reads, strict=True)):
                # Relative to the current batch: the tables will have newer versions.
                head = f"{ahead_of(self._trainer, server)}{batch - self.updated}."
                ahead |= {f"{head}{name}": x for name, x in flight_tensors(rows, read).items()}
        pieces = full_pieces(self.remembered.tensors(), Group.LEVELS)
        return pieces + full_pieces(ahead, Group.LOOKUPS)

    def settle(self) -> Program[None]:
        """Take what is under way, and wait until all updates have arrived."""
        for batch in list(self._flights):
            yield from self._take(batch)
        # Table servers handle a rank's messages in order: they answer this one last.
        _, split = split_batch(self.nothing, self.servers)
        yield from self._look_up(split)

    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        """Resume after `version` batches from `state_ahead`, if `values` hold it."""
        self.updated = version
        self.remembered.load(values)
        flights = [
            flights_of(values, ahead_of(self._trainer, server), held)
            for server, held in enumerate(self._held_S)
        ]
        self._flights = {
            BatchNumber(batch): _Flight([rows for rows, _ in parts], [read for _, read in parts])
            for batch, parts in enumerate(zip(*flights, strict=True), version)
        }

    def _send(self, split: SplitIds, number: int, microbatch: int = 0) -> None:
        for to, asked, rows_F in zip(self._group, split.asked, self._rows_S, strict=True):
            sections, dense_bytes = id_sections(asked, rows_F), ID_BYTES * asked.lookups
            self._port.send(
                to, Kind.LOOKUP, number, sections, microbatch=microbatch, dense_bytes=dense_bytes
            )

    def _look_up(self, split: SplitIds) -> Program[Tensor]:
        """Look up rows (K, D) as they are once all updates are applied."""
        updated = self.updated
        with self.looking_up:
            self._send(split, updated, EVALUATION)
        rows_S = [asked.ids for asked in split.asked]
        reads = yield from self._messages(self._exact, rows_S, updated, EVALUATION)
        return split.joined([torch.from_numpy(values_KD) for values_KD, _ in reads])

    def _take(self, batch: BatchNumber) -> Program[list[Tensor]]:
        """Take the rows of a batch, by server, and forget it."""
        flight = self._flights[batch]
        reads = yield from self._read(batch, flight)
        del self._flights[batch]
        with self.looking_up:
            pairs = enumerate(zip(flight.rows_S, reads, strict=True))
            return [torch.from_numpy(self.remembered.take(place, *pair)) for place, pair in pairs]

    def _read(self, batch: BatchNumber, flight: _Flight) -> Program[Sequence[Read]]:
        if flight.reads is None:
            flight.reads = yield from self._messages(self.remembered, flight.rows_S, batch)
        return flight.reads

    def _messages(
        self, end: TrainerEnd, rows_S: Sequence[Rows], number: int, microbatch: int = 0
    ) -> Program[list[Read]]:
        """Read the rows that come from each server."""
        reads: list[Read] = []
        for place, (server, rows) in enumerate(zip(self._group, rows_S, strict=True)):
            frame = yield Receive(Kind.ROWS, server, number, microbatch=microbatch)
            what = f"rows {number} of rank {server}"
            if len(frame.sections) != 1:
                raise DlrmError(f"{what}: {len(frame.sections)} sections, expected 1")
            with self.looking_up, blamed(what):
                reads.append(end.read(place, rows, message_of(frame.sections[0], end.dtype)))
        return reads


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
        self.remembered = client.remembered
        self._flying: dict[BatchNumber, tuple[DistinctIds, SplitIds]] = {}

    @override
    def prefetch(self, batch: BatchNumber, bags: Bags[Tensor]) -> None:
        if batch in self._flying:
            return
        with self._client.looking_up:
            self._flying[batch] = _, split = split_batch(bags, self._client.servers)
            self._client.ask(batch, split)

    @override
    def lookup(self, batch: BatchNumber, bags: Bags[Tensor], lr: float) -> Program[Tensor]:
        self.prefetch(batch, bags)
        rows_KD = yield from self._client.receive(batch)
        with self._client.looking_up:
            return self._flying[batch][0].pool(rows_KD)

    @override
    def update(self, batch: BatchNumber, gradient_BFD: Tensor) -> Program[None]:
        yield from ()
        with self._client.looking_up:
            ids, split = self._flying.pop(batch)
            sum_KD = ids.sum_by_id(mean_part(gradient_BFD, self._averaged))
            self._client.update(split, batch, sum_KD)

    @override
    def predict(self, bags: Bags[Tensor]) -> Program[Tensor]:
        return self._client.predict(bags)

    @override
    def state_ahead(self) -> Program[list[Piece]]:
        return self._client.state_ahead()

    @override
    def settle(self) -> Program[None]:
        self._flying.clear()
        return self._client.settle()

    @override
    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        self._flying.clear()
        self._client.restart(version, values)
