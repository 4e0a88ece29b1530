"""From the configuration to a worker process, with its tables if it has any."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.group import GroupOptions, process_group
from dlrm_hybrid.comm.mailbox import Mailbox, SharedMailbox
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.dense.server import HandlerTable
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.parallel.tables.local import LocalTables
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.run.assembly import world as build_world
from dlrm_hybrid.run.assembly.engine import mailbox_capacity
from dlrm_hybrid.run.assembly.world import Layout
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.train.asynchronous.crew import Crew
from dlrm_hybrid.train.evaluation import WorldEvaluation
from dlrm_hybrid.train.worker_rank import WorkerRank

if TYPE_CHECKING:
    from dlrm_hybrid.model.sharded_embeddings import ShardedEmbeddings


@contextmanager
def worker_rank(
    config: Config,
    layout: Layout,
    shards: Shards | None,
    channel: MeteredChannel,
    answers: HandlerTable | None,
    group: GroupOptions,
    meter: RankMeter,
) -> Generator[WorkerRank, None, None]:
    """Build the worker of the channel's rank; its process group is open inside a `with`.

    Args:
        config: that of the run.
        layout: that of the world.
        shards: prepared rows; None if orders bring batches along.
        channel: to the other ranks.
        answers: handlers of frames while it waits; None without any.
        group: options of the process group of workers that share the tables.
        meter: that of the rank.

    Raises:
        DlrmError: the trainers that share the tables did not all join.
    """
    topology, rank = layout.topology, channel.rank
    patience_seconds = config.network.patience_seconds
    mailbox = Mailbox(channel, layout.attempt, mailbox_capacity(config))
    if answers is not None:
        mailbox.answer = answers
    with ExitStack() as stack:
        pieces: Sequence[Piece] = ()
        tables: tuple[Tables | None, Tables | None] = (None, None)
        if rank in topology.interaction_group and topology.table_servers:
            served = build_world.served_tables(config, layout, rank, channel.send, meter.clock)
            tables = (served, served)
        elif rank in topology.interaction_group and topology.trainers == 1:
            embeddings = build_model.embeddings(config, layout.spec)
            pieces = full_pieces({**embeddings.weights(), **embeddings.optimizer_state()})
            own = LocalTables(embeddings, 1, meter.clock)
            tables = (own, own)
        elif rank in topology.interaction_group:
            sharded = _sharded(config, layout, channel, group, meter.clock, stack)
            pieces = sharded.pieces
            tables = (
                LocalTables(
                    _EqualBatches(sharded, topology.trainers),
                    topology.trainers,
                    meter.clock,
                    sharded.levels,
                ),
                LocalTables(sharded, topology.trainers, meter.clock),
            )
        messenger = Messenger(
            attempt=layout.attempt,
            channel=channel,
            mailbox=mailbox,
            patience_seconds=patience_seconds,
            clock=meter.clock,
        )
        yield _worker(config, layout, shards, messenger, tables, pieces, meter)


def _worker(
    config: Config,
    layout: Layout,
    shards: Shards | None,
    messenger: Messenger,
    tables: tuple[Tables | None, Tables | None],
    pieces: Sequence[Piece],
    meter: RankMeter,
) -> WorkerRank:
    """Build the worker, with tables for training and for batches of any size."""
    rank, stages = messenger.rank, layout.topology.stages
    send = messenger.channel.send
    reads = build_model.readers(
        config,
        shards,
        (rank // stages,),
        0 if tables[0] is None else config.embedding.staleness,
        None if tables[0] is None else meter.sample_ids(),
        meter.clock,
    )
    parts = build_world.worker(config, layout, rank, send, tables[0], meter.clock)
    runner = ProcessRunner(
        mailbox=messenger.mailbox,
        patience_seconds=messenger.patience_seconds,
        clock=meter.clock,
    )
    evaluation = WorldEvaluation(
        topology=layout.topology,
        messenger=messenger,
        runner=runner,
        evaluator=build_world.evaluator(config, layout, parts.worker, send, tables[1]),
        rows=build_model.evaluated_rows(config, shards),
    )
    return WorkerRank(
        topology=layout.topology,
        messenger=messenger,
        runner=runner,
        worker=parts.worker,
        client=parts.client,
        compression=parts.compression,
        tables=pieces,
        reads=reads,
        traffic=meter.steps_traffic,
        schedule=build_model.dense_schedule(config, layout.steps, lowered=layout.lowered),
        lowered=layout.lowered,
        evaluation=evaluation,
        leader=build.leader(config),
    )


def crew(config: Config, layout: Layout, rank: WorkerRank, meter: RankMeter) -> Crew:
    """Build the threads of a worker; use its own parts only while they are at rest."""
    messenger = rank.messenger
    parts = build_world.WorkerParts(
        worker=rank.worker, client=rank.client, compression=rank.compression
    )
    mailbox, clock = SharedMailbox(messenger.mailbox), meter.clock
    return Crew(
        build_world.thread_workers(config, layout, parts, messenger.channel.send, clock),
        ProcessRunner(mailbox=mailbox, patience_seconds=messenger.patience_seconds, clock=clock),
        mailbox,
        meter,
    )


@final
@dataclass(frozen=True, slots=True)
class _EqualBatches:
    """Shared tables for batches of one size, which trainers need not exchange."""

    embeddings: ShardedEmbeddings
    trainers: int

    def __call__(self, bags: Bags[Tensor]) -> Tensor:
        return self.embeddings(bags, [bags.rows] * self.trainers)

    def set_lr(self, lr: float) -> None:
        self.embeddings.set_lr(lr)


def _sharded(
    config: Config,
    layout: Layout,
    channel: MeteredChannel,
    options: GroupOptions,
    clock: SpanClock,
    stack: ExitStack,
) -> ShardedEmbeddings:
    """Build the tables that all trainers share, with their initial values."""
    # TorchRec takes a second to import, which only ranks that share tables need.
    from dlrm_hybrid.model.sharded_embeddings import ShardedEmbeddings

    def count(sent_bytes: int, dense_equivalent_bytes: int, received_bytes: int) -> None:
        counters = channel.counters
        counters.sent.add(Traffic.EMBEDDING, sent_bytes, dense_equivalent_bytes)
        counters.received.add(Traffic.EMBEDDING, received_bytes, 0)

    members = layout.topology.interaction_group
    group = stack.enter_context(process_group(members, channel.rank, options, count, clock))
    levels = build_model.level_options(config)
    embeddings = ShardedEmbeddings(layout.spec, config.embedding, levels, group)
    embeddings.initialise(config.train.seed, config.embedding.init)
    return embeddings
