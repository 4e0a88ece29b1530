"""From the configuration to a world in one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.sharding import CommPrecision, Rounding
from dlrm_hybrid.parallel.dense.server import Handle, ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.parallel.tables.local import LocalTables
from dlrm_hybrid.parallel.tables.shared import AllIds, EachIdOnce, JointTables, SharedTables
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.assembly.world import Layout
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.train.evaluation import TestPart
from dlrm_hybrid.train.in_process import InProcessEngine, Ranks
from dlrm_hybrid.wire.frame import Frame, Kind

MAILBOX_CAPACITY = 4096


def test_part(config: Config, shards: Shards) -> TestPart:
    """The rows to evaluate."""
    rows = shards.test_rows(config.data.test_part)
    return TestPart(shards, rows, config.evaluate.batch_size)


def engine(config: Config, shards: Shards, steps: int, clock: SpanClock) -> InProcessEngine:
    """A world in one process, with initial values; `parallel=single` is a world of one rank.

    Args:
        config: of the run.
        shards: prepared rows.
        steps: of the whole run; learning rates may depend on it.
        clock: of the process.
    """
    layout = build_world.layout(config, shards.table_rows, steps, attempt=0)
    topology = layout.topology
    channels = [
        MeteredChannel(channel, Counters(), clock) for channel in in_process_channels(topology.size)
    ]
    embeddings = build_model.embeddings(config, layout.spec)
    tables, evaluation_tables = _tables(config, layout, embeddings, clock)
    ranks = _ranks(config, layout, channels, tables, embeddings, clock)
    evaluators = [
        build_world.evaluator(
            config, layout, ranks.workers[rank], channels[rank].send, evaluation_tables.get(rank)
        )
        for rank in range(topology.stages)
    ]
    mailboxes = {
        rank: Mailbox(channels[rank], layout.attempt, MAILBOX_CAPACITY)
        for rank in range(topology.num_workers)
    }
    return InProcessEngine(
        ranks=ranks,
        messenger=Messenger(
            attempt=layout.attempt,
            channel=channels[0],
            mailbox=mailboxes[0],
            patience_seconds=config.network.patience_seconds,
        ),
        runner=InProcessRunner(
            mailboxes=mailboxes,
            servers=[
                (channel, _handler(config, layout, index, server, clock))
                for index, (channel, server) in enumerate(ranks.servers)
            ],
            clock=clock,
        ),
        reads=[
            clock.timed(Span.READ, build_model.loader(config, shards, trainer).read)
            for trainer in range(topology.trainers)
        ],
        schedule=build_model.schedule(config, config.optimizer.lr, steps),
        evaluators=evaluators,
        test=test_part(config, shards),
    )


def _ranks(
    config: Config,
    layout: Layout,
    channels: Sequence[MeteredChannel],
    tables: Mapping[int, Tables],
    embeddings: Embeddings,
    clock: SpanClock,
) -> Ranks:
    topology = layout.topology
    parts = [
        build_world.worker(config, layout, rank, channels[rank].send, tables.get(rank), clock)
        for rank in range(topology.num_workers)
    ]
    return Ranks(
        workers=[one.worker for one in parts],
        clients=[one.client for one in parts],
        compressions=[one.compression for one in parts],
        servers=[
            (channels[topology.server(index)], build_world.server(config, layout, index, clock))
            for index in range(topology.servers)
        ],
        channels=channels,
        tables=embeddings,
    )


def _handler(
    config: Config, layout: Layout, index: int, server: ParameterServer, clock: SpanClock
) -> Handle:
    """What a server does with frames: pushes, and contributions where there are any."""
    collect = build_world.collectives(config, layout, index)

    def handle(frame: Frame) -> Sequence[Outgoing]:
        if collect is not None and frame.kind is Kind.CONTRIBUTION:
            return collect(frame)
        return server.handle(frame)

    return clock.timed(Span.APPLY, handle)


def _tables(
    config: Config, layout: Layout, embeddings: Embeddings, clock: SpanClock
) -> tuple[Mapping[int, Tables], Mapping[int, Tables]]:
    """For training and for evaluation, by rank; only rows of several trainers would travel."""
    group = layout.topology.interaction_group
    if len(group) == 1:
        own = {group[0]: LocalTables(embeddings, 1, clock)}
        return own, own
    rounding = Rounding(CommPrecision(config.embedding.comm_precision))
    look_up = EachIdOnce if config.embedding.deduplicate else AllIds
    joint = JointTables(look_up(embeddings, rounding), clock)
    return (
        {rank: SharedTables(joint, group) for rank in group},
        {group[0]: SharedTables(joint, group[:1])},
    )
