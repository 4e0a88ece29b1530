"""Trainers that only look up and update, and their table servers, in one process."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.bounds import WirePrecision
from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.compress.embedding.memory import LevelOptions, Rows
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.exchange.floats import row_formats
from dlrm_hybrid.model.optimizer import Constant, LrSchedule
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Embedding, Fused, Served
from dlrm_hybrid.model.tensors import Piece, draw_embeddings
from dlrm_hybrid.parallel.effects import Outgoing, Port, Program
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.parallel.tables.cached import CachedTables
from dlrm_hybrid.parallel.tables.order import BatchOrder, TableOrder
from dlrm_hybrid.parallel.tables.served import ServedTables, TableClient
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.types import BatchNumber
from dlrm_hybrid.wire.frame import Frame

SPEC = ModelSpec(embedding_dim=8, bottom=(13, 8), top=(1,), table_rows=(1, 2, 7, 50) + (20,) * 22)
SGD = Fused()
ROWS, LR, SEED = 12, 32.0, 3
CONSTANT = Constant(base_lr=LR)
BagsOf = Callable[[int, int], Bags[Tensor]]  # of a trainer and a batch
Gradient = Callable[[Tensor, int], Tensor]  # of pooled rows and a trainer


def ids_of(trainer: int, batch: int) -> Tensor:
    rng = np.random.default_rng([trainer, batch])
    return torch.from_numpy(np.stack([rng.integers(0, rows, ROWS) for rows in SPEC.table_rows]))


def plain_bags(trainer: int, batch: int) -> Bags[Tensor]:
    return Bags(ids_of(trainer, batch))


def gradient_of(pooled_BFD: Tensor, trainer: int) -> Tensor:
    """Depends on the rows, so that rows of another version show; float16 holds sums of it."""
    return torch.sin(9 * pooled_BFD + trainer) / 64


class World:
    """Trainers that only look up and update, and their table servers."""

    def __init__(
        self,
        trainers: int = 1,
        servers: int = 1,
        staleness: int = 0,
        options: Embedding = SGD,
        precision: WirePrecision = "float32",
        order: TableOrder | None = None,
        schedule: LrSchedule = CONSTANT,
        cache: Served | None = None,
        levels: LevelOptions | None = None,
    ) -> None:
        self.staleness = staleness
        self.topology = Topology(
            trainers=trainers,
            stages=1,
            servers=int(trainers > 1),
            interaction_stage=0,
            table_servers=servers,
        )
        self.counters = Counters()
        channels = [
            MeteredChannel(channel, self.counters, SpanClock())
            for channel in in_process_channels(self.topology.size)
        ]
        formats = row_formats(precision, SPEC.table_rows, levels)
        self.servers: list[TableServer] = []
        for index in range(servers):
            rows = TableRows(SPEC, options, index, servers)
            rows.draw(SEED)
            self.servers.append(
                TableServer(
                    *(self.topology, index, rows),
                    order=order or BatchOrder(staleness),
                    formats=formats,
                    schedule=schedule,
                    attempt=0,
                    clock=SpanClock(),
                )
            )
        ports = [
            Port(topology=self.topology, rank=rank, attempt=0, transmit=channels[rank].send)
            for rank in range(trainers)
        ]
        clients = [TableClient(port, SPEC, formats, SpanClock()) for port in ports]
        self.tables: list[Tables] = [
            ServedTables(client, trainers)
            if cache is None
            else CachedTables(client, trainers, cache)
            for client in clients
        ]
        group = self.topology.table_server_group
        self.runner = InProcessRunner(
            mailboxes={rank: Mailbox(channels[rank], 0, 64) for rank in range(trainers)},
            servers=[
                (channels[rank], server.handle)
                for rank, server in zip(group, self.servers, strict=True)
            ],
            clock=SpanClock(),
        )

    def learn(
        self,
        first: int,
        batches: int,
        bags_of: BagsOf = plain_bags,
        gradient: Gradient = gradient_of,
    ) -> None:
        numbers = range(first, first + batches)
        programs = {
            trainer: learning(tables, trainer, numbers, self.staleness, bags_of, gradient)
            for trainer, tables in enumerate(self.tables)
        }
        self.runner.run(programs)

    def weights(self) -> dict[str, Tensor]:
        return joined([piece for server in self.servers for piece in server.pieces()])


def learning(
    tables: Tables,
    trainer: int,
    batches: range,
    staleness: int,
    bags_of: BagsOf = plain_bags,
    gradient: Gradient = gradient_of,
) -> Program[None]:
    for number in batches:
        for later in range(number, number + staleness + 1):
            tables.prefetch(BatchNumber(later), bags_of(trainer, later))
        batch = BatchNumber(number)
        pooled_BFD = yield from tables.lookup(batch, bags_of(trainer, number), LR)
        yield from tables.update(batch, gradient(pooled_BFD, trainer))


def joined(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """Full tensors, in memory of their own."""
    full: dict[str, Tensor] = {}
    for piece in pieces:
        tensor = full.setdefault(piece.name, torch.full(piece.shape, torch.nan))
        tensor[piece.begin[0] :: piece.every] = piece.view
    return full


def drawn() -> Embeddings:
    embeddings = Embeddings(SPEC, SGD)
    draw_embeddings(embeddings.weights(), SEED)
    return embeddings


def assert_moved(weights: dict[str, Tensor]) -> None:
    for name, first in drawn().weights().items():
        assert (weights[name] - first).abs().max() > 0.1, name


def reference_gradient(
    weights: dict[str, Tensor], trainer: int, batch: int, trainers: int
) -> tuple[Rows, Tensor]:
    """Of each distinct id, summed in the order of the batch."""
    ids_K: list[int] = []
    counts_F: list[int] = []
    sums: list[Tensor] = []
    for number, ids_B in enumerate(ids_of(trainer, batch)):
        pooled_BD = weights[f"embedding.{number + 1}.weight"][ids_B]
        gradient_BD = gradient_of(pooled_BD, trainer) / trainers
        found = sorted(set(ids_B.tolist()))
        for one in found:
            sums.append(torch.zeros(SPEC.embedding_dim))
            for row in (ids_B == one).nonzero()[:, 0]:
                sums[-1] += gradient_BD[row]
        ids_K += found
        counts_F.append(len(found))
    return Rows(np.array(ids_K), np.array(counts_F)), torch.stack(sums)


def repeat(world: World, chosen: Callable[[Frame], bool]) -> None:
    """Let servers take each chosen frame twice."""

    def handle_twice(server: TableServer) -> Callable[[Frame], Sequence[Outgoing]]:
        def handle(frame: Frame) -> Sequence[Outgoing]:
            found = server.handle(frame)
            if chosen(frame):
                assert server.handle(frame) == []
            return found

        return handle

    servers = [
        (channel, handle_twice(server))
        for (channel, _), server in zip(world.runner.servers, world.servers, strict=True)
    ]
    world.runner = InProcessRunner(
        mailboxes=world.runner.mailboxes, servers=servers, clock=SpanClock()
    )
