"""From the configuration to the workers and servers of a world; imports torch, for the ranks."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from dlrm_hybrid.bags import Bags
from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.group import GroupOptions, process_group
from dlrm_hybrid.comm.mailbox import Mailbox, SharedMailbox, answers_none
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.comm.netem.plan import NETWORK as EMULATED_NETWORK
from dlrm_hybrid.comm.rendezvous import own_address
from dlrm_hybrid.comm.zmq.channel import ALL_STAY, Membership
from dlrm_hybrid.compress.device.feedback import DeviceFeedback, can_move
from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.context import StageContext
from dlrm_hybrid.compress.gradient.layout import Layout as FlatLayout
from dlrm_hybrid.compress.gradient.layout import Spec
from dlrm_hybrid.config.rules import server_leads
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.columns import ColumnBags
from dlrm_hybrid.model.dlrm import StageModel, draw_initial
from dlrm_hybrid.model.layers.products import Precision
from dlrm_hybrid.model.optimizer import Constant
from dlrm_hybrid.model.placement import HOST, Placement, cuda_devices
from dlrm_hybrid.model.row_storage import RowStorage
from dlrm_hybrid.model.spec import ModelShape, Partition
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tables import Served
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.boundaries import Boundaries
from dlrm_hybrid.parallel.collectives import CollectiveServer
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.parallel.dense.bucket import ServerOptions
from dlrm_hybrid.parallel.dense.client import Client, DeviceClient, LocalClient, ServerClient
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.dense.peers import MasterClient, PeerClient
from dlrm_hybrid.parallel.dense.server import Handle, ParameterServer
from dlrm_hybrid.parallel.dense.threads import thread_clients
from dlrm_hybrid.parallel.effects import Port, Send
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.parallel.stage import Stage
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.parallel.tables.cached import CachedTables
from dlrm_hybrid.parallel.tables.local import LocalTables
from dlrm_hybrid.parallel.tables.order import ArrivalOrder, BatchOrder
from dlrm_hybrid.parallel.tables.served import ServedTables, TableClient
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.parallel.topology import DenseTensor, Topology, WorkerRole, lay_out
from dlrm_hybrid.parallel.worker import Worker
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.telemetry.traffic import Traffic
from dlrm_hybrid.train.asynchronous.crew import Crew
from dlrm_hybrid.train.progress import Progress
from dlrm_hybrid.train.worker_rank import Learner, WorkerRank
from dlrm_hybrid.types import Group
from dlrm_hybrid.wire.frame import Frame

if TYPE_CHECKING:
    from dlrm_hybrid.model.sharded_embeddings import ShardedEmbeddings

LOOPBACK = "127.0.0.1"
FRAMES_BESIDE_ROWS = 4096  # far more than may wait for a worker


def address(config: Config) -> str:
    """The address on which ranks of this machine listen."""
    if config.network.name == "emulated":
        return own_address(str(EMULATED_NETWORK))
    return own_address(config.network.bind or LOOPBACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The layout of a world: who computes and who owns what.

    Attributes:
        config: configuration of the run.
        spec: the whole model.
        partition: its stages.
        topology: ranks of workers and servers.
        tensors: all dense parameters with their stages and servers.
        steps: number in the whole run, for learning rates.
        attempt: how often the run has been restarted.
        placement: where the workers of this process compute.
        tables: where their tables are, if they have any: on the host, or there.
        lowered: first steps of lower learning rates; appended to with `schedule=plateau`.
        clock: clock of this process.
    """

    config: Config
    spec: ModelShape
    partition: Partition
    topology: Topology
    tensors: tuple[DenseTensor, ...]
    steps: int
    attempt: int
    placement: Placement = HOST
    tables: Placement = HOST
    lowered: list[int] = field(default_factory=list[int])
    clock: SpanClock = field(default_factory=SpanClock)


def layout(config: Config, spec: ModelShape, steps: int, attempt: int, rank: int = 0) -> Layout:
    """Lay out the world that the configuration describes, for the process with this rank.

    Raises:
        ResourceError: its device is not there.
    """
    partition = Partition.of(spec, config.parallel.cuts)
    topology = build.topology(config)
    assert topology.interaction_stage == partition.interaction_stage
    tensors = lay_out(spec.dense_shapes(), partition.stage_of, config.parallel.servers)
    where = placement(config, topology, rank)
    return Layout(
        config=config,
        spec=spec,
        partition=partition,
        topology=topology,
        tensors=tensors,
        steps=steps,
        attempt=attempt,
        placement=where,
        tables=HOST if config.embedding.device == "cpu" else where,
    )


def placement(config: Config, topology: Topology, rank: int) -> Placement:
    """The device of a worker; with `device=cuda` a machine's workers get its devices in turn.

    Raises:
        ResourceError: the device is not there.
    """
    kind, _, number = config.device.partition(":")
    if kind == "cpu" or not isinstance(topology.role(rank), WorkerRole):
        return HOST
    devices = cuda_devices(config.device)
    machine = partial(topology.machine, machines=config.parallel.machines or 1)
    beside = [other for other in range(rank) if machine(other) == machine(rank)]
    return Placement(torch.device(kind, int(number or len(beside) % devices)), is_apart=True)


def membership(config: Config, rank: int, incarnation: int) -> Membership:
    """The ranks that a rank outlives: servers all trainers, a worker the other trainers."""
    if not config.parallel.elastic:
        return ALL_STAY
    workers = frozenset(range(build.topology(config).num_workers))
    mates = build.mates(config, rank)
    return Membership(
        mortal=workers - mates, may_return=not mates, incarnation=incarnation, mates=mates
    )


def pushes(config: Config, progress: Progress) -> list[int]:
    """Pushes that a server has counted per stage: each worker's, or all if asynchronous."""
    stages = range(len(config.parallel.cuts) + 1)
    if server_leads(config):
        return [progress.step * config.parallel.trainers for _ in stages]
    order = build.pipeline(config)
    return [order.pushed(stage, progress.step, progress.emptied) for stage in stages]


def optimizer_config(layout: Layout, stage: int) -> OptimizerConfig:
    """Optimizer and rates for a stage's pushes: gradients, or finished updates."""
    config = layout.config
    schedule = build_model.dense_schedule(config, layout.steps, stage, layout.lowered)
    if config.gradient.uses_lr:
        schedule = Constant(base_lr=1.0)
    return OptimizerConfig(optimizer=config.optimizer, schedule=schedule)


def compression(layout: Layout, rank: int) -> Compression:
    """Build the compressors of the worker with this rank."""
    config, topology = layout.config, layout.topology
    trainer, stage = divmod(rank, topology.stages)
    gradients = None
    if topology.servers or topology.trainers > 1:
        specs = [
            Spec(tensor.id, tensor.name, tensor.shape)
            for tensor in layout.tensors
            if tensor.stage == stage
        ]
        context = StageContext(
            layout=FlatLayout(specs),
            trainer=trainer,
            trainers=topology.trainers,
            model_elements=sum(tensor.count for tensor in layout.tensors),
            last_layer=layout.spec.last_layer,
            lr=build_model.dense_schedule(config, layout.steps, stage, layout.lowered).lr,
            seed=config.train.seed,
        )
        gradients = gradient_codec = config.gradient.build(context)
        if layout.placement.is_apart and can_move(gradient_codec):
            gradients = DeviceFeedback(gradient_codec, [layout.placement.device] * len(specs))
    activations = build_model.activations(config, layout.partition.stages[stage])
    return Compression(trainer=trainer, gradients=gradients, activations=activations)


def stage_model(layout: Layout, stage: int) -> StageModel:
    """Build the layers of one stage, with their initial values, where it computes."""
    config, part = layout.config, layout.partition.stages[stage]
    model = StageModel(layout.spec, part, Precision(config.precision), config.train.seed)
    return model.to(layout.placement.device)


def worker(layout: Layout, rank: int, send: Send, tables: Tables | None) -> Learner:
    """Build the worker with this rank, with initial values.

    Args:
        layout: layout of the world.
        rank: rank of the worker.
        send: sends a frame to any rank.
        tables: access to the tables; None at a stage without the interaction.
    """
    port = _port(layout, rank, send)
    model = stage_model(layout, port.stage)
    codecs = replace(compression(layout, rank), tables=tables)
    client, weights_client = _clients(layout, port, model, codecs)
    boundaries = Boundaries(port, model.part, codecs.activations, layout.clock)
    built = _worker(layout, model, boundaries, tables, client)
    return Learner(worker=built, client=weights_client, compression=codecs)


def _port(layout: Layout, rank: int, send: Send) -> Port:
    return Port(topology=layout.topology, rank=rank, attempt=layout.attempt, transmit=send)


def thread_workers(layout: Layout, learner: Learner, send: Send) -> Sequence[Worker]:
    """Build a worker per thread, with its own batches and lookups, sharing all else.

    Args:
        layout: layout of the world.
        learner: the worker.
        send: sends a frame to any rank, from any thread.
    """
    owner, client, codecs = learner.worker, learner.client, learner.compression
    assert isinstance(client, ServerClient), "sync=async needs servers"
    clients = thread_clients(client, layout.config.parallel.threads, codecs.turn, layout.clock)
    return [
        replace(
            owner,
            stage=owner.stage.empty(),
            boundaries=Boundaries(
                owner.boundaries.port, owner.part, codecs.activations, layout.clock
            ),
            tables=owner.tables and served_tables(layout, owner.rank, send),
            client=client,
        )
        for client in clients
    ]


def evaluator(layout: Layout, owner: Worker, send: Send, tables: Tables | None) -> Worker:
    """Build a worker for evaluations: the stage of `owner`, with separate weights."""
    port = _port(layout, owner.rank, send)
    model = stage_model(layout, port.stage)
    codecs = build_model.evaluation_activations(layout.config, model.part)
    boundaries = Boundaries(port, model.part, codecs, SpanClock())
    return _worker(layout, model, boundaries, tables, owner.client)


def _clients(
    layout: Layout, port: Port, model: StageModel, codecs: Compression
) -> tuple[Client, ServerClient | MasterClient]:
    """The client that steps use, and the one below it, of the worker's masters or servers."""
    config, clock = layout.config, layout.clock
    weights, optimizer = model.dense_parameters(), optimizer_config(layout, port.stage)
    compressor, placement = codecs.gradients, layout.placement
    if compressor is None:
        local = LocalClient(weights, optimizer, clock)
        return local, local
    replica: Mapping[str, Tensor] = weights
    if placement.is_apart:
        replica = dict(zip(weights, placement.down([*weights.values()]), strict=True))
    if layout.topology.servers:
        means = optimizer if config.gradient.publishes_means else None
        client = ServerClient(
            port, layout.tensors, replica, build.policy(config), compressor, clock, means
        )
    else:
        options = server_options(layout)
        client = PeerClient(port, layout.tensors, replica, options, compressor, clock)
    if not placement.is_apart:
        return client, client
    compresses = isinstance(compressor, DeviceFeedback)
    return DeviceClient(client, weights, replica, placement, compresses=compresses), client


def _worker(
    layout: Layout,
    model: StageModel,
    boundaries: Boundaries,
    tables: Tables | None,
    client: Client,
) -> Worker:
    config, port = layout.config, boundaries.port
    return Worker(
        rank=port.rank,
        stage=Stage(
            model,
            config.schedule.microbatches,
            config.optimizer.l2,
            (port.rank // port.topology.stages, config.parallel.trainers),
            layout.placement,
            layout.spec.loss_weights,
            layout.tables,
        ),
        pipeline=build.pipeline(config),
        boundaries=boundaries,
        tables=tables,
        columns=ColumnBags.of(layout.spec, layout.tables.device),
        embedding_schedule=build_model.embedding_schedule(config, layout.steps, layout.lowered),
        client=client,
    )


def server(layout: Layout, index: int) -> ParameterServer:
    """Build a server with the initial values of its tensors."""
    values: dict[str, Tensor] = {
        tensor.name: torch.empty(tensor.shape)
        for tensor in layout.tensors
        if tensor.server == index
    }
    draw_initial(layout.spec, values, layout.config.train.seed)
    options = server_options(layout)
    return ParameterServer(layout.topology, index, layout.tensors, values, options, layout.clock)


def server_options(layout: Layout) -> ServerOptions:
    """How masters are updated, published and compared, on servers or on trainers without any."""
    config = layout.config
    return ServerOptions(
        policy=build.policy(config),
        optimizers=[optimizer_config(layout, stage) for stage in range(layout.topology.stages)],
        check_every=config.sync.check_every,
        attempt=layout.attempt,
        pull=config.pull,
        publishes_means=config.gradient.publishes_means,
    )


def table_server(layout: Layout, index: int, storage: RowStorage) -> TableServer:
    """Build a table server with the initial values of its rows."""
    config, keys = layout.config, layout.config.embedding
    rows = TableRows(layout.spec, keys, index, config.parallel.table_servers, storage)
    rows.draw(config.train.seed, keys.init)
    order = BatchOrder(keys.staleness)
    return TableServer(
        layout.topology,
        index,
        rows,
        order=ArrivalOrder(config.parallel.threads) if server_leads(config) else order,
        formats=build_model.formats_of(config, layout.spec),
        schedule=build_model.embedding_schedule(config, layout.steps, layout.lowered),
        attempt=layout.attempt,
        clock=layout.clock,
    )


def served_tables(layout: Layout, rank: int, send: Send) -> Tables:
    """Build a worker's access to served tables."""
    config, keys = layout.config, layout.config.embedding
    formats = build_model.formats_of(config, layout.spec)
    client = TableClient(_port(layout, rank, send), layout.spec, formats, layout.clock)
    averaged = 1 if config.sync.name == "async" else config.parallel.trainers
    if isinstance(keys, Served) and keys.cache_rows:
        return CachedTables(client, averaged, keys)
    return ServedTables(client, averaged)


def collectives(layout: Layout, index: int) -> Handle | None:
    """The handler of contributions on a server; None if the method has no rounds."""
    ops = tuple(Op(name) for name in layout.config.gradient.rounds())
    if not ops:
        return None
    return CollectiveServer(layout.topology, index, layout.tensors, ops, layout.attempt).handle


@contextmanager
def worker_rank(
    layout: Layout,
    shards: Shards | None,
    channel: MeteredChannel,
    group: GroupOptions,
    meter: RankMeter,
) -> Generator[WorkerRank, None, None]:
    """Build the worker of the channel's rank; its process group is open inside a `with`.

    Args:
        layout: layout of the world.
        shards: prepared rows; None if orders bring batches along.
        channel: to the other ranks.
        group: options of the process group of workers that share the tables.
        meter: meter of the rank.

    Raises:
        DlrmError: the trainers that share the tables did not all join.
    """
    config, topology, rank = layout.config, layout.topology, channel.rank
    with ExitStack() as stack:
        pieces: Sequence[Piece] = ()
        tables: tuple[Tables | None, Tables | None] = (None, None)
        if rank in topology.interaction_group and topology.table_servers:
            served = served_tables(layout, rank, channel.send)
            tables = (served, served)
        elif rank in topology.interaction_group and topology.trainers == 1:
            embeddings = build_model.embeddings(config, layout.spec, layout.tables)
            pieces = full_pieces(
                {**embeddings.weights(), **embeddings.optimizer_state()}, Group.EMBEDDINGS
            )
            local = LocalTables(embeddings, 1, layout.clock)
            tables = (local, local)
        elif rank in topology.interaction_group:
            sharded = _sharded(layout, channel, group, stack)
            pieces = sharded.pieces
            tables = (
                LocalTables(
                    _EqualBatches(sharded, topology.trainers),
                    topology.trainers,
                    layout.clock,
                    sharded.remembered,
                ),
                LocalTables(sharded, topology.trainers, layout.clock, keep_rows=sharded.keep_rows),
            )
        messenger = messenger_of(layout, channel)
        yield _worker_rank(layout, shards, messenger, tables, pieces, meter)


def messenger_of(
    layout: Layout, channel: Channel, answer: Callable[[Frame], bool] = answers_none
) -> Messenger:
    """Make a rank's messenger to the others, whose mailbox answers some frames at once."""
    config = layout.config
    ahead = (config.embedding.staleness + 1) * config.parallel.table_servers  # frames of rows
    return Messenger(
        attempt=layout.attempt,
        channel=channel,
        mailbox=Mailbox(channel, layout.attempt, FRAMES_BESIDE_ROWS + ahead, answer),
        patience_seconds=config.network.patience_seconds,
        clock=layout.clock,
    )


def _worker_rank(
    layout: Layout,
    shards: Shards | None,
    messenger: Messenger,
    tables: tuple[Tables | None, Tables | None],
    pieces: Sequence[Piece],
    meter: RankMeter,
) -> WorkerRank:
    """Build the worker, with tables for training and for batches of any size."""
    config, send = layout.config, messenger.channel.send
    learner = worker(layout, messenger.rank, send, tables[0])
    runner = ProcessRunner(
        mailbox=messenger.mailbox,
        patience_seconds=messenger.patience_seconds,
        clock=layout.clock,
    )
    return WorkerRank(
        topology=layout.topology,
        messenger=messenger,
        runner=runner,
        learner=learner,
        tables=pieces,
        traffic=meter.steps_traffic,
        schedule=build_model.dense_schedule(config, layout.steps, lowered=layout.lowered),
        lowered=layout.lowered,
        evaluator=evaluator(layout, learner.worker, send, tables[1]),
        rows=build_model.evaluated_rows(config, shards),
        leader=build.leader(config),
    )


def crew(layout: Layout, rank: WorkerRank, meter: RankMeter) -> Crew:
    """Build the threads of a worker; use the worker's own parts only while they are at rest."""
    messenger = rank.messenger
    mailbox, clock = SharedMailbox(messenger.mailbox), layout.clock
    return Crew(
        thread_workers(layout, rank.learner, messenger.channel.send),
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
    layout: Layout, channel: MeteredChannel, options: GroupOptions, stack: ExitStack
) -> ShardedEmbeddings:
    """Build the tables that all trainers share, with their initial values."""
    # TorchRec takes a second to import, which only ranks that share tables need.
    from dlrm_hybrid.model.sharded_embeddings import ShardedEmbeddings

    def count(sent_bytes: int, dense_equivalent_bytes: int, received_bytes: int) -> None:
        counters = channel.counters
        counters.sent.add(Traffic.EMBEDDING, sent_bytes, dense_equivalent_bytes)
        counters.received.add(Traffic.EMBEDDING, received_bytes, 0)

    config, members = layout.config, layout.topology.interaction_group
    group = stack.enter_context(process_group(members, channel.rank, options, count, layout.clock))
    formats = build_model.formats_of(config, layout.spec)
    embeddings = ShardedEmbeddings(layout.spec, config.embedding, formats, group)
    embeddings.initialise(config.train.seed, config.embedding.init)
    return embeddings
