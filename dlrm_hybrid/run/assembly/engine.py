"""From the configuration to a world in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.row_storage import RowStorage
from dlrm_hybrid.model.sharding import casts
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.dense.server import Handle, ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.tables.base import Remembered, Tables
from dlrm_hybrid.parallel.tables.local import LocalTables
from dlrm_hybrid.parallel.tables.shared import AllIds, EachIdOnce, JointTables, SharedTables
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.parallel.worker import Worker
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.assembly.world import Layout
from dlrm_hybrid.telemetry.histogram import IdSample
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.train.asynchronous.order_log import TAKEN, Gate, order_file, read_order
from dlrm_hybrid.train.asynchronous.pace import Pace, SimulatedPace, Trainers
from dlrm_hybrid.train.asynchronous.replay import RecordedPace
from dlrm_hybrid.train.in_process import InProcessEngine, Ranks
from dlrm_hybrid.types import Group
from dlrm_hybrid.wire.frame import Frame, Kind


def engine(
    config: Config, shards: Shards, steps: int, storage: RowStorage, clock: SpanClock
) -> InProcessEngine:
    """Build the engine of `engine_of` for prepared rows; `steps` is their number in the run."""
    layout = build_world.layout(config, build.shape_of(config, shards.manifest), steps, attempt=0)
    return engine_of(config, layout, shards, storage, clock)


def engine_of(
    config: Config, layout: Layout, shards: Shards | None, storage: RowStorage, clock: SpanClock
) -> InProcessEngine:
    """Build a world in one process, with initial values; `parallel=single` is one rank.

    Args:
        config: configuration of the run.
        layout: layout of the world.
        shards: prepared rows; None if a program hands batches over.
        storage: storage of the rows of table servers.
        clock: clock of the process.
    """
    topology = layout.topology
    channels = [
        MeteredChannel(channel, Counters(), clock) for channel in in_process_channels(topology.size)
    ]
    if config.embedding.name == "served":
        access = _served(config, layout, channels, storage, clock)
    else:
        access = _shared(config, layout, clock)
    ranks = _ranks(config, layout, channels, access, clock)
    mailboxes = {
        rank: Mailbox(channels[rank], layout.attempt, build_world.mailbox_capacity(config))
        for rank in range(topology.num_workers)
    }
    servers = _servers(config, layout, ranks, clock)
    gates = _gates(config, topology, servers)
    if gates:
        servers = [(channel, gate.take) for (channel, _), gate in zip(servers, gates, strict=True)]
    runner = InProcessRunner(mailboxes=mailboxes, servers=servers, clock=clock)
    sample = IdSample()
    return InProcessEngine(
        ranks=ranks,
        id_sample=sample,
        messenger=Messenger(
            attempt=layout.attempt,
            channel=channels[0],
            mailbox=mailboxes[0],
            patience_seconds=config.network.patience_seconds,
            clock=clock,
        ),
        runner=runner,
        reads=build_model.readers(
            config, shards, range(topology.trainers), config.embedding.staleness, sample, clock
        ),
        schedule=build_model.dense_schedule(config, layout.steps, lowered=layout.lowered),
        lowered=layout.lowered,
        evaluators=_evaluators(config, layout, ranks, access),
        rows=build_model.evaluated_rows(config, shards),
        pace=shards and _pace(config, shards, ranks, runner, gates, clock, sample),
    )


def _servers(config: Config, layout: Layout, ranks: Ranks, clock: SpanClock) -> list[Server]:
    return [
        *(
            (channel, _handler(config, layout, index, server, clock))
            for index, (channel, server) in enumerate(ranks.servers)
        ),
        *(
            (channel, clock.timed(Span.APPLY, server.handle))
            for channel, server in ranks.table_servers
        ),
    ]


def _evaluators(config: Config, layout: Layout, ranks: Ranks, emb: _Access) -> list[Worker]:
    """Evaluators with the stages of trainer 0."""
    return [
        build_world.evaluator(
            config, layout, ranks.workers[rank], ranks.channels[rank].send, emb.evaluation.get(rank)
        )
        for rank in range(layout.topology.stages)
    ]


def _ranks(
    config: Config,
    layout: Layout,
    channels: Sequence[MeteredChannel],
    emb: _Access,
    clock: SpanClock,
) -> Ranks:
    topology = layout.topology
    parts = [
        build_world.worker(config, layout, rank, channels[rank].send, emb.training.get(rank), clock)
        for rank in range(topology.num_workers)
    ]
    return Ranks(
        workers=[worker.worker for worker in parts],
        clients=[worker.client for worker in parts],
        compressions=[worker.compression for worker in parts],
        servers=[
            (channels[topology.server(index)], build_world.server(config, layout, index, clock))
            for index in range(topology.servers)
        ],
        channels=channels,
        tables=emb.pieces,
        table_servers=emb.servers,
    )


def _handler(
    config: Config, layout: Layout, index: int, server: ParameterServer, clock: SpanClock
) -> Handle:
    """The handler of a server's frames: pushes, and contributions if there are any."""
    collect = build_world.collectives(config, layout, index)

    def handle(frame: Frame) -> Iterable[Outgoing]:
        if collect is not None and frame.kind is Kind.CONTRIBUTION:
            return collect(frame)
        return server.handle(frame)

    return clock.timed(Span.APPLY, handle)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    """Tables of a world, and access to them by rank; `evaluation` has trainer 0's alone."""

    pieces: Sequence[Piece]
    training: Mapping[int, Tables]
    evaluation: Mapping[int, Tables]
    servers: Sequence[tuple[MeteredChannel, TableServer]] = ()


def _shared(config: Config, layout: Layout, clock: SpanClock) -> _Access:
    """One set of tables for all trainers, with the rounding of transport if there are several."""
    embeddings = build_model.embeddings(config, layout.spec, layout.tables)
    pieces = full_pieces({**embeddings.weights(), **embeddings.optimizer_state()}, Group.EMBEDDINGS)
    group = layout.topology.interaction_group
    if len(group) == 1:
        tables = {group[0]: LocalTables(embeddings, 1, clock)}
        return _Access(pieces=pieces, training=tables, evaluation=tables)
    look_up = AllIds(embeddings, casts(config.embedding.comm_precision))
    remembered: Sequence[Remembered | None] = [None] * len(group)
    if config.embedding.deduplicate:
        both = build_model.formats_of(config, layout.spec)
        look_up = EachIdOnce.of(embeddings, layout.spec, both, len(group))
        remembered = look_up.ends
    joint = JointTables(look_up, clock)
    return _Access(
        pieces=pieces,
        training={
            rank: SharedTables(joint, group, end)
            for rank, end in zip(group, remembered, strict=True)
        },
        evaluation={group[0]: SharedTables(joint, group[:1])},
    )


def _served(
    config: Config,
    layout: Layout,
    channels: Sequence[MeteredChannel],
    storage: RowStorage,
    clock: SpanClock,
) -> _Access:
    topology = layout.topology
    servers = [
        (channels[rank], build_world.table_server(config, layout, index, storage, clock))
        for index, rank in enumerate(topology.table_server_group)
    ]
    tables = {
        rank: build_world.served_tables(config, layout, rank, channels[rank].send, clock)
        for rank in topology.interaction_group
    }
    return _Access(
        pieces=[piece for _, server in servers for piece in server.pieces()],
        training=tables,
        evaluation=tables,
        servers=servers,
    )


Server = tuple[Channel, Handle]


def _gates(config: Config, topology: Topology, servers: Sequence[Server]) -> list[Gate]:
    """Gates that keep the order of `sync.replay` at each server; none without it.

    Raises:
        DataError: a server's record is missing.
    """
    if config.sync.replay is None:
        return []
    record = [
        read_order(order_file(Path(config.sync.replay), topology.name(channel.rank)))
        for channel, _ in servers
    ]
    return [
        Gate(handle, iter([frame for frame in order if frame.kind in TAKEN]))
        for (_, handle), order in zip(servers, record, strict=True)
    ]


def _pace(
    config: Config,
    shards: Shards,
    ranks: Ranks,
    runner: InProcessRunner,
    gates: Sequence[Gate],
    clock: SpanClock,
    sample: IdSample,
) -> Pace | None:
    """The pace of asynchronous trainers; None in lockstep.

    Args:
        config: configuration of the run.
        shards: prepared rows.
        ranks: ranks of the world.
        runner: runner of their programs.
        gates: gates of the servers, for a replay.
        clock: clock of the process.
        sample: counts the ids of batches.
    """
    if config.sync.name != "async":
        return None
    topology, loader = build.topology(config), build_model.loader(config, shards, sample=sample)
    trainers = Trainers(
        workers=[
            [ranks.workers[topology.worker(trainer, stage)] for stage in range(topology.stages)]
            for trainer in range(topology.trainers)
        ],
        clients=dict(enumerate(ranks.clients)),
        runner=runner,
        part=clock.timed(Span.READ, loader.part),
        after=loader.after,
    )
    plan = build_model.plan(config, shards)
    if config.sync.replay is None:
        return SimulatedPace(
            trainers=trainers, plan=plan, seed=config.train.seed, ahead=config.sync.ahead
        )
    leader = topology.name(build.leader(config))
    order = read_order(order_file(Path(config.sync.replay), leader))
    return RecordedPace(
        trainers=trainers,
        plan=plan,
        rests_on_record=deque(frame.number for frame in order if frame.kind is Kind.SAVE),
        leases=deque(frame for frame in order if frame.kind is Kind.DECISION),
        ahead=config.embedding.staleness,
        gates=gates,
        source=config.sync.replay,
    )
