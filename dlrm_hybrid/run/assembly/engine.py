"""From the configuration to the engine of one process: a whole model, or a whole world."""

from __future__ import annotations

from dlrm_hybrid.comm.in_process import in_process_channels
from dlrm_hybrid.comm.mailbox import Mailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.embeddings import Embeddings
from dlrm_hybrid.model.sharding import CommPrecision, Rounding
from dlrm_hybrid.model.step import Trainer
from dlrm_hybrid.parallel.in_process import InProcessWorld
from dlrm_hybrid.parallel.tables.shared import SharedDistinctTables, SharedTables, WorldTables
from dlrm_hybrid.parallel.timed import TimedChannel
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import server as build_server
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.telemetry.traffic import Counters
from dlrm_hybrid.train.engine import Engine
from dlrm_hybrid.train.evaluation import TestPart
from dlrm_hybrid.train.in_process import InProcessEngine, Ranks
from dlrm_hybrid.train.single import SingleEngine

MAILBOX_CAPACITY = 4096


def engine(config: Config, shards: Shards, steps: int, clock: SpanClock) -> Engine:
    """The engine that the configuration asks for, with initial values.

    Args:
        config: of the run.
        shards: prepared rows.
        steps: of the whole run; learning rates may depend on it.
        clock: of the process.
    """
    if config.parallel.name == "single":
        return _single(config, shards, steps, clock)
    return _in_process(config, shards, steps, clock)


def test_part(config: Config, shards: Shards) -> TestPart:
    """The rows to evaluate."""
    rows = shards.test_rows(config.data.test_part)
    return TestPart(shards, rows, config.evaluate.batch_size)


def _single(config: Config, shards: Shards, steps: int, clock: SpanClock) -> SingleEngine:
    model = build_model.model(config, shards.table_rows)
    base_lr = config.embedding.lr or config.optimizer.lr
    return SingleEngine(
        trainer=Trainer(model, build_model.dense_optimizer(config), clock),
        read=clock.timed(Span.READ, build_model.loader(config, shards).read),
        schedule=build_model.schedule(config, config.optimizer.lr, steps),
        embedding_schedule=build_model.schedule(config, base_lr, steps),
        test=test_part(config, shards),
    )


def _in_process(config: Config, shards: Shards, steps: int, clock: SpanClock) -> InProcessEngine:
    layout = build_world.layout(config, shards.table_rows, steps, attempt=0)
    topology = layout.topology
    channels = _channels(topology.size, clock)
    parts = [
        build_world.worker(config, layout, rank, channels[rank].send, clock)
        for rank in range(topology.num_workers)
    ]
    servers = [
        (channels[topology.server(index)], build_server.server(config, layout, index, clock))
        for index in range(topology.servers)
    ]
    embeddings = build_model.embeddings(config, layout.spec)
    tables = _tables(config, embeddings)
    mailboxes = {
        rank: Mailbox(channels[rank], layout.attempt, MAILBOX_CAPACITY)
        for rank in range(topology.num_workers)
    }
    evaluators = [
        build_world.evaluator(config, layout, rank, parts[rank].client, channels[rank].send)
        for rank in range(topology.stages)
    ]
    answering = [
        (channel, clock.timed(Span.APPLY, build_server.handle(config, layout, index, server)))
        for index, (channel, server) in enumerate(servers)
    ]
    group = topology.interaction_group
    return InProcessEngine(
        ranks=Ranks(
            workers=[one.worker for one in parts],
            clients=[one.client for one in parts],
            compressions=[one.compression for one in parts],
            servers=servers,
            channels=channels,
            tables=embeddings,
        ),
        world=InProcessWorld(
            mailboxes=mailboxes,
            servers=answering,
            tables=tables,
            interaction_group=group,
            clock=clock,
        ),
        reads=[
            clock.timed(Span.READ, build_model.loader(config, shards, trainer).read)
            for trainer in range(topology.trainers)
        ],
        schedule=build_model.schedule(config, config.optimizer.lr, steps),
        evaluators=evaluators,
        evaluation_world=InProcessWorld(
            mailboxes=mailboxes,
            servers=[],
            tables=tables,
            interaction_group=group[:1],
            clock=clock,
        ),
        test=test_part(config, shards),
    )


def _channels(ranks: int, clock: SpanClock) -> list[MeteredChannel]:
    """Of all ranks; they count for the phase that the engine is told of."""
    nothing = Counters()
    timed = [TimedChannel(channel, clock) for channel in in_process_channels(ranks)]
    return [MeteredChannel(channel, nothing) for channel in timed]


def _tables(config: Config, embeddings: Embeddings) -> WorldTables:
    """What a world of processes computes; rows of one trainer do not travel."""
    if config.parallel.trainers == 1:
        return SharedTables(embeddings, Rounding(CommPrecision.FLOAT32))
    rounding = Rounding(CommPrecision(config.embedding.comm_precision))
    if config.embedding.deduplicate:
        return SharedDistinctTables(embeddings, rounding)
    return SharedTables(embeddings, rounding)
