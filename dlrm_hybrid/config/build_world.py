"""From the configuration to the workers and servers of a world; imports torch, for the ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dlrm_hybrid.comm.own_address import own_address
from dlrm_hybrid.compress.activation.dense import DenseCodec
from dlrm_hybrid.config import build, build_model
from dlrm_hybrid.config.schema import Config
from dlrm_hybrid.model.initialise import draw_dense
from dlrm_hybrid.model.mlp import Precision
from dlrm_hybrid.model.partition import Partition
from dlrm_hybrid.model.spec import ModelSpec
from dlrm_hybrid.model.stage_model import StageModel
from dlrm_hybrid.parallel.client import Client, LocalClient, ServerClient
from dlrm_hybrid.parallel.master import Learning
from dlrm_hybrid.parallel.parameter_server import ParameterServer, ServerOptions
from dlrm_hybrid.parallel.policy import Bounded, Policy, Sync
from dlrm_hybrid.parallel.schedule import SCHEDULES
from dlrm_hybrid.parallel.topology import DenseTensor, Topology, lay_out
from dlrm_hybrid.parallel.worker import Send, Worker

LOOPBACK = "127.0.0.1"


def address(config: Config) -> str:
    """Where a rank listens."""
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
    """How dense weights learn."""
    return Learning(
        optimizer=build_model.dense_optimizer(config),
        schedule=build_model.schedule(config, config.optimizer.lr, plan.steps),
    )


def stage_model(config: Config, plan: Layout, stage: int) -> StageModel:
    """The layers of one stage, with their initial values."""
    part = plan.partition.stages[stage]
    return StageModel(plan.spec, part, Precision(config.precision), config.train.seed)


def client(
    config: Config, plan: Layout, rank: int, model: StageModel
) -> ServerClient | LocalClient:
    """A worker's tie to the owners of its weights."""
    if plan.topology.servers == 0:
        name = plan.topology.name(rank)
        return LocalClient(name, model.dense_parameters(), learning(config, plan))
    replica = model.dense_parameters()
    return ServerClient(plan.topology, rank, plan.tensors, replica, policy(config), plan.attempt)


def worker(
    config: Config, plan: Layout, rank: int, model: StageModel, owner: Client, send: Send
) -> Worker:
    """The worker with this rank."""
    stage = rank % plan.topology.stages
    ops = SCHEDULES[config.schedule.name](stage, plan.topology.stages, config.schedule.microbatches)
    base_lr = config.embedding.lr or config.optimizer.lr
    return Worker(
        rank=rank,
        attempt=plan.attempt,
        model=model,
        codec=DenseCodec(),
        ops=ops,
        client=owner,
        embedding_schedule=build_model.schedule(config, base_lr, plan.steps),
        send=send,
    )


def server(config: Config, plan: Layout, index: int) -> ParameterServer:
    """A server with the initial values of what it owns."""
    values: dict[str, Tensor] = {
        tensor.name: torch.empty(tensor.shape) for tensor in plan.tensors if tensor.server == index
    }
    draw_dense(values, config.train.seed)
    options = ServerOptions(
        policy=policy(config), check_every=config.sync.check_every, attempt=plan.attempt
    )
    return ParameterServer(
        plan.topology, index, plan.tensors, values, learning(config, plan), options
    )
