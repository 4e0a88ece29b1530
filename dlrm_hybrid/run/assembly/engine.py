"""From the configuration to a world in one process."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.row_storage import RowStorage
from dlrm_hybrid.model.sharding import casts
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.dense.server import Handle, ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.tables.base import Remembered, Tables
from dlrm_hybrid.parallel.tables.local import LocalTables
from dlrm_hybrid.parallel.tables.shared import AllIds, EachIdOnce, JointTables, SharedTables
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.assembly.world import Layout
from dlrm_hybrid.telemetry.histogram import IdSample
from dlrm_hybrid.telemetry.spans import Span
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.train.asynchronous.order_log import TAKEN, Gate, order_file, read_order
from dlrm_hybrid.train.asynchronous.pace import Pace, SimulatedPace, Trainers
from dlrm_hybrid.train.asynchronous.replay import RecordedPace
from dlrm_hybrid.train.in_process import InProcessEngine, Ranks
from dlrm_hybrid.types import Group
from dlrm_hybrid.wire.frame import Frame, Kind


def engine(config: Config, shards: Shards, steps: int, storage: RowStorage) -> InProcessEngine:
    """Build the engine of `engine_of` for prepared rows; `steps` is how many the run makes."""
    layout = build_world.layout(config, build.shape_of(config, shards.manifest), steps, attempt=0)
    return engine_of(layout, shards, storage)


def engine_of(layout: Layout, shards: Shards | None, storage: RowStorage) -> InProcessEngine:
    """Build a world in one process, with initial values; `parallel=single` is one rank.

    Args:
        layout: layout of the world.
        shards: prepared rows; None if a program hands batches over.
        storage: storage of the rows of table servers.
    """
    config, topology, clock = layout.config, layout.topology, layout.clock
    channels = [
        MeteredChannel(channel, Counters(), clock) for channel in in_process_channels(topology.size)
    ]
    if config.embedding.name == "served":
        access = _served(layout, channels, storage)
    else:
        access = _shared(layout)
    ranks = _ranks(layout, channels, access)
    messengers = [
        build_world.messenger_of(layout, channel) for channel in channels[: topology.num_workers]
    ]
    servers = _servers(layout, ranks)
    gates = _gates(layout, servers)
    if gates:
        servers = [(channel, gate.take) for (channel, _), gate in zip(servers, gates, strict=True)]
    mailboxes = {messenger.rank: messenger.mailbox for messenger in messengers}
    runner = InProcessRunner(mailboxes=mailboxes, servers=servers, clock=clock)
    sample = IdSample()
    return InProcessEngine(
        ranks=ranks,
        id_sample=sample,
        messenger=messengers[0],
        runner=runner,
        reads=build_model.readers(
            config, shards, range(topology.trainers), config.embedding.staleness, sample, clock
        ),
        schedule=build_model.dense_schedule(config, layout.steps, lowered=layout.lowered),
        lowered=layout.lowered,
        evaluators=[  # with the stages of trainer 0
            build_world.evaluator(layout, worker, channels[rank].send, access.evaluation.get(rank))
            for rank, worker in enumerate(ranks.workers[: topology.stages])
        ],
        rows=build_model.evaluated_rows(config, shards),
        pace=shards and _pace(layout, shards, ranks, runner, gates, sample),
    )


def _servers(layout: Layout, ranks: Ranks) -> list[Server]:
    clock = layout.clock
    dense = [
        (channel, clock.timed(Span.APPLY, _handler(layout, index, server)))
        for index, (channel, server) in enumerate(ranks.servers)
    ]
    of_tables = [
        (channel, clock.timed(Span.APPLY, server.handle)) for channel, server in ranks.table_servers
    ]
    return [*dense, *of_tables]


def _ranks(layout: Layout, channels: Sequence[MeteredChannel], emb: _Access) -> Ranks:
    topology = layout.topology
    return Ranks(
        learners=[
            build_world.worker(layout, rank, channels[rank].send, emb.training.get(rank))
            for rank in range(topology.num_workers)
        ],
        servers=[
            (channels[topology.server(index)], build_world.server(layout, index))
            for index in range(topology.servers)
        ],
        channels=channels,
        tables=emb.pieces,
        table_servers=emb.servers,
    )


def _handler(layout: Layout, index: int, server: ParameterServer) -> Handle:
    """The handler of a server's frames: pushes, and contributions if there are any."""
    collect = build_world.collectives(layout, index)

    def handle(frame: Frame) -> Iterable[Outgoing]:
        if collect is not None and frame.kind is Kind.CONTRIBUTION:
            return collect(frame)
        return server.handle(frame)

    return handle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Access:
    """Tables of a world, and access to them by rank; evaluation needs trainer 0's alone."""

    pieces: Sequence[Piece]
    training: Mapping[int, Tables]
    evaluation: Mapping[int, Tables]
    servers: Sequence[tuple[MeteredChannel, TableServer]] = ()


def _shared(layout: Layout) -> _Access:
    """One set of tables for all trainers, with the rounding of transport if there are several."""
    config, clock = layout.config, layout.clock
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


def _served(layout: Layout, channels: Sequence[MeteredChannel], storage: RowStorage) -> _Access:
    topology = layout.topology
    servers = [
        (channels[rank], build_world.table_server(layout, index, storage))
        for index, rank in enumerate(topology.table_server_group)
    ]
    tables = {
        rank: build_world.served_tables(layout, rank, channels[rank].send)
        for rank in topology.interaction_group
    }
    return _Access(
        pieces=[piece for _, server in servers for piece in server.pieces()],
        training=tables,
        evaluation=tables,
        servers=servers,
    )


Server = tuple[Channel, Handle]


def _gates(layout: Layout, servers: Sequence[Server]) -> list[Gate]:
    """Gates that keep the order of `sync.replay` at each server; none without it.

    Raises:
        DataError: a server's record is missing.
    """
    if (replay := layout.config.sync.replay) is None:
        return []
    record = [
        read_order(order_file(Path(replay), layout.topology.name(channel.rank)))
        for channel, _ in servers
    ]
    return [
        Gate(handle, iter([frame for frame in order if frame.kind in TAKEN]))
        for (_, handle), order in zip(servers, record, strict=True)
    ]


def _pace(
    layout: Layout,
    shards: Shards,
    ranks: Ranks,
    runner: InProcessRunner,
    gates: Sequence[Gate],
    sample: IdSample,
) -> Pace | None:
    """The pace of asynchronous trainers; None in lockstep.

    Args:
        layout: layout of the world.
        shards: prepared rows.
        ranks: ranks of the world.
        runner: runner of their programs.
        gates: gates of the servers, for a replay.
        sample: counts the ids of batches.
    """
    config, topology = layout.config, layout.topology
    if config.sync.name != "async":
        return None
    loader = build_model.loader(config, shards, sample=sample)
    trainers = Trainers(
        learners=[
            ranks.learners[first : first + topology.stages]
            for first in range(0, topology.num_workers, topology.stages)
        ],
        runner=runner,
        part=layout.clock.timed(Span.READ, loader.part),
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
