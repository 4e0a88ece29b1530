"""From the configuration to the workers and servers of a world; imports torch, for the ranks."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from dlrm_hybrid.comm.netem.plan import NETWORK as EMULATED_NETWORK
from dlrm_hybrid.comm.own_address import own_address
from dlrm_hybrid.compress.activation.codec import ActivationCodec
from dlrm_hybrid.compress.gradient.layout import Spec, layout_of
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.layers import Precision
from dlrm_hybrid.model.optimizer import Constant
from dlrm_hybrid.model.spec import ModelSpec, Partition
from dlrm_hybrid.model.stage_model import StageModel
from dlrm_hybrid.parallel.collectives.reduce import CollectiveClient
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.parallel.dense.client import Client, LocalClient, ServerClient
from dlrm_hybrid.parallel.dense.master import Learning
from dlrm_hybrid.parallel.dense.options import ClientOptions
from dlrm_hybrid.parallel.outgoing import Send
from dlrm_hybrid.parallel.schedule import SCHEDULES
from dlrm_hybrid.parallel.sync.policy import Bounded, Policy, Sync
from dlrm_hybrid.parallel.timed import TimedClient, TimedCodec, TimedCompressor
from dlrm_hybrid.parallel.topology import DenseTensor, Topology, lay_out
from dlrm_hybrid.parallel.worker import Worker
from dlrm_hybrid.run.assembly import activations as build_compress
from dlrm_hybrid.run.assembly import build
from dlrm_hybrid.run.assembly import gradient as build_gradient
from dlrm_hybrid.run.assembly import model as build_model
from dlrm_hybrid.telemetry.spans import SpanClock

LOOPBACK = "127.0.0.1"


def address(config: Config) -> str:
    """Where a rank listens."""
    if config.network.name == "emulated":
        return own_address(str(EMULATED_NETWORK))
    return own_address(config.network.bind or LOOPBACK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who computes and who owns what in a world.

    Attributes:
        spec: the whole model.
        partition: its stages.
        topology: ranks of workers and servers.
        tensors: every dense parameter with its stage and server.
        steps: of the whole run; learning rates may depend on it.
        attempt: how often the run has been restarted.
    """

    spec: ModelSpec
    partition: Partition
    topology: Topology
    tensors: tuple[DenseTensor, ...]
    steps: int
    attempt: int


def layout(config: Config, table_rows: tuple[int, ...], steps: int, attempt: int) -> Layout:
    """The world that the configuration describes."""
    spec = build_model.spec(config, table_rows)
    partition = Partition.of(spec, config.parallel.cuts)
    topology = build.topology(config)
    assert topology.interaction_stage == partition.interaction_stage
    tensors = lay_out(spec.dense_shapes(), partition.stage_of, config.parallel.servers)
    return Layout(
        spec=spec,
        partition=partition,
        topology=topology,
        tensors=tensors,
        steps=steps,
        attempt=attempt,
    )


def policy(config: Config) -> Policy:
    """How old the weights of a step may be."""
    return Bounded(config.sync.staleness) if config.sync.name == "bounded" else Sync()


def learning(config: Config, plan: Layout) -> Learning:
    """How dense weights learn from what is pushed: gradients, or finished updates."""
    schedule = build_model.schedule(config, config.optimizer.lr, plan.steps)
    if config.gradient.residual == "update":
        schedule = Constant(base_lr=1.0)
    return Learning(optimizer=build_model.dense_optimizer(config), schedule=schedule)


def compression(config: Config, plan: Layout, rank: int) -> Compression:
    """All that the worker with this rank compresses with."""
    trainer, stage = divmod(rank, plan.topology.stages)
    gradients = None
    if plan.topology.servers:
        specs = [
            Spec(tensor.id, tensor.name, tensor.shape)
            for tensor in plan.tensors
            if tensor.stage == stage
        ]
        gradients = build_gradient.compressor(
            config,
            layout_of(specs),
            trainer=trainer,
            model_elements=sum(prod(tensor.shape) for tensor in plan.tensors),
            steps=plan.steps,
        )
    activations = build_compress.activations(config, plan.partition.stages[stage])
    return Compression(trainer=trainer, gradients=gradients, activations=activations)


def stage_model(config: Config, plan: Layout, stage: int) -> StageModel:
    """The layers of one stage, with their initial values."""
    part = plan.partition.stages[stage]
    return StageModel(plan.spec, part, Precision(config.precision), config.train.seed)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """A worker, its tie to the owners of its weights, and all that it compresses with."""

    worker: Worker
    client: ServerClient | LocalClient
    compression: Compression


def worker(config: Config, plan: Layout, rank: int, send: Send, clock: SpanClock) -> WorkerParts:
    """The worker with this rank, with initial values, each part with a clock around it."""
    model = stage_model(config, plan, rank % plan.topology.stages)
    own = compression(config, plan, rank)
    owner = _client(config, plan, rank, model, own, clock)
    codec = TimedCodec(own.activations, clock)
    made = _worker(config, plan, rank, model, codec, TimedClient(owner, clock), send)
    return WorkerParts(worker=made, client=owner, compression=own)


def evaluator(config: Config, plan: Layout, rank: int, owner: Client, send: Send) -> Worker:
    """The same stage with weights of its own, to predict with."""
    model = stage_model(config, plan, rank % plan.topology.stages)
    codec = build_compress.evaluation_activations(config, model.part)
    return _worker(config, plan, rank, model, codec, owner, send)


def _client(
    config: Config,
    plan: Layout,
    rank: int,
    model: StageModel,
    own: Compression,
    clock: SpanClock,
) -> ServerClient | LocalClient:
    weights = model.dense_parameters()
    if own.gradients is None:
        return LocalClient(plan.topology.name(rank), weights, learning(config, plan))
    options = ClientOptions(
        policy=policy(config),
        attempt=plan.attempt,
        learning=learning(config, plan) if build_gradient.tells_levels(config) else None,
    )
    return ServerClient(
        plan.topology,
        rank,
        plan.tensors,
        weights,
        options,
        TimedCompressor(own.gradients, clock),
        clock,
    )


def _worker(
    config: Config,
    plan: Layout,
    rank: int,
    model: StageModel,
    codec: ActivationCodec,
    owner: Client,
    send: Send,
) -> Worker:
    stages = plan.topology.stages
    base_lr = config.embedding.lr or config.optimizer.lr
    return Worker(
        rank=rank,
        attempt=plan.attempt,
        model=model,
        codec=codec,
        ops=SCHEDULES[config.schedule.name](rank % stages, stages, config.schedule.microbatches),
        client=owner,
        collectives=CollectiveClient(
            topology=plan.topology, rank=rank, attempt=plan.attempt, send=send
        ),
        embedding_schedule=build_model.schedule(config, base_lr, plan.steps),
        send=send,
    )
