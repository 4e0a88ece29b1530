"""Servers and their workers' clients, with lists instead of channels and synthetic gradients."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.compress.gradient.compressor import Compressor, Dense
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.model.optimizer import (
    Adagrad,
    Adam,
    Linear,
    LrSchedule,
    Momentum,
    Optimizer,
    Sgd,
)
from dlrm_hybrid.parallel.dense.bucket import ServerOptions
from dlrm_hybrid.parallel.dense.client import Client, ServerClient
from dlrm_hybrid.parallel.dense.master import OptimizerConfig
from dlrm_hybrid.parallel.dense.pulls import Pulls
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing, Port, Program
from dlrm_hybrid.parallel.sync import SyncPolicy
from dlrm_hybrid.parallel.topology import Topology, lay_out
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.wire.frame import Frame, decode, encode
from dlrm_hybrid.wire.section import Dtype

SHAPES = {"bottom.1.weight": (33, 13), "bottom.1.bias": (33,), "top.1.weight": (1, 5)}
SCHEDULE = Linear(base_lr=0.1, steps=100)
OPTIMIZERS: list[Optimizer] = [Sgd(), Momentum(), Adagrad(eps=1e-10), Adam(eps=1e-8)]
EVERY_OPTIMIZER = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: one.name)

Gradients = Callable[[int, int], dict[str, Tensor]]
"""Of a trainer at a step."""


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients_of(trainer: int, step: int) -> dict[str, Tensor]:
    return drawn(1000 * trainer + step + 1)


def gappy_gradients_of(trainer: int, step: int) -> dict[str, Tensor]:
    """A few large elements, many small ones, and half of all are zero, now and then a tensor."""
    rng = np.random.default_rng((trainer, step))
    return {
        name: torch.from_numpy(
            (rng.standard_t(2, shape) * (rng.random(shape) < rng.choice([0.0, 0.4, 0.7]))).astype(
                np.float32
            )
        )
        for name, shape in SHAPES.items()
    }


def travel(one: Outgoing) -> Frame:
    """What the receiver sees."""
    return decode(encode(one.frame))


def arrived(outgoing: Sequence[Outgoing]) -> list[Outgoing]:
    """Encoded at once, as a channel does: the frames show the sender's memory."""
    return [one._replace(frame=travel(one)) for one in outgoing]


def pushed(client: Client, out: list[Outgoing], gradients: Mapping[str, Tensor]) -> list[Outgoing]:
    """What a client pushes into `out`; its method needs no rounds."""
    out.clear()
    assert list(client.push(gradients)) == []
    return [*out]


class World:
    """Trainers of one stage or two, servers, and lists instead of channels.

    `pull` is None for levels.
    """

    def __init__(
        self,
        trainers: int,
        policy: SyncPolicy,
        *,
        optimizer: Optimizer | None = None,
        servers: int = 1,
        stages: int = 1,
        check_every: int = 1,
        pull: Dtype | None = Dtype.FLOAT32,
        pull_sparsity: float | None = None,
        publishes_means: bool = False,
        make: Callable[[Layout], Compressor] = Dense,
        gradients: Gradients = gradients_of,
        schedule: LrSchedule = SCHEDULE,
        values: Mapping[str, Tensor] | None = None,
    ) -> None:
        precision = "levels" if pull is None else pull.name.lower()
        self._pulls = Pulls(precision=precision, sparsity=pull_sparsity)
        self.publishes_means = publishes_means
        self.gradients = gradients
        self._values = drawn(0) if values is None else values
        self.topology = Topology(
            trainers=trainers, stages=stages, servers=servers, interaction_stage=0
        )
        stage_of = {name: stages - 1 if name.startswith("top") else 0 for name in SHAPES}
        self.tensors = lay_out(SHAPES, stage_of, servers)
        self.optimizer = OptimizerConfig(optimizer=optimizer or Sgd(), schedule=schedule)
        self.policy = policy
        self.mail: list[Outgoing] = []
        self._out: list[Outgoing] = []
        self.servers = {
            self.topology.server(index): self.server(index, check_every) for index in range(servers)
        }
        self.replicas = [
            {name: value.clone() for name, value in self._values.items()} for _ in range(trainers)
        ]
        self.compressors = {
            rank: make(Layout(self.specs(rank))) for rank in range(self.topology.num_workers)
        }
        self.clients = {rank: self.client(rank) for rank in self.compressors}

    def server(self, index: int, check_every: int = 1) -> ParameterServer:
        options = self.options(check_every)
        return ParameterServer(
            self.topology, index, self.tensors, self._values, options, SpanClock()
        )

    def options(self, check_every: int = 1) -> ServerOptions:
        return ServerOptions(
            policy=self.policy,
            optimizers=[self.optimizer] * self.topology.stages,
            check_every=check_every,
            attempt=0,
            pull=self._pulls,
            publishes_means=self.publishes_means,
        )

    def specs(self, rank: int) -> list[Spec]:
        """Of the tensors of a worker's stage."""
        stage = rank % self.topology.stages
        return [Spec(one.id, one.name, one.shape) for one in self.tensors if one.stage == stage]

    def client(self, rank: int) -> ServerClient:
        replica = self.replicas[rank // self.topology.stages]
        optimizer = self.optimizer if self.publishes_means else None
        return ServerClient(
            Port(topology=self.topology, rank=rank, attempt=0, transmit=self._transmit),
            *(self.tensors, replica),
            *(self.policy, self.compressors[rank], SpanClock(), optimizer),
        )

    def _transmit(self, to: int, frame: Frame, dense_equivalent_bytes: int) -> None:
        self._out.append(Outgoing(to, frame, dense_equivalent_bytes))

    def push(
        self, rank: int, step: int, gradients: Mapping[str, Tensor] | None = None
    ) -> list[Outgoing]:
        if gradients is None:
            gradients = self.gradients(rank // self.topology.stages, step)
        return pushed(self.clients[rank], self._out, gradients)

    def arrive(self, pushes: Sequence[Outgoing]) -> None:
        for push in pushes:
            self.mail += arrived(self.servers[push.to].handle(travel(push)))

    def pull(self, rank: int) -> None:
        for want in self.clients[rank].wanted():
            found = next(one for one in self.mail if one.to == rank and is_wanted(one, want))
            self.mail.remove(found)
            self.clients[rank].apply(found.frame)

    def refresh(self, rank: int, *, whole: bool = False) -> None:
        """Let a worker pull, and take what is still under way to it."""
        self.drive(rank, self.clients[rank].refresh(whole))

    def drive(self, rank: int, program: Program[None]) -> None:
        """Run a program of a worker; what it sends arrives at once."""
        self._out.clear()
        answer = None
        while True:
            try:
                wanted = program.send(answer)
            except StopIteration:
                self.arrive(self._out)
                return
            self.arrive(self._out)
            self._out.clear()
            found = next(one for one in self.mail if one.to == rank and is_wanted(one, wanted))
            self.mail.remove(found)
            answer = found.frame

    def run(self, first: int, end: int) -> list[dict[str, Tensor]]:
        """Steps of all trainers; what the last of them computed each step with."""
        used: list[dict[str, Tensor]] = []
        for step in range(first, end):
            ranks = range(self.topology.num_workers)
            for rank in ranks:
                self.pull(rank)
            used.append({name: tensor.clone() for name, tensor in self.replicas[-1].items()})
            self.arrive([push for rank in ranks for push in self.push(rank, step)])
        return used

    def held(self) -> dict[str, Tensor]:
        """Copies of all that the servers' checkpoints hold."""
        return {
            name: tensor.clone()
            for server in self.servers.values()
            for name, tensor in server.tensors().items()
        }

    def restart(self, step: int, values: Mapping[str, Tensor]) -> None:
        """Servers and clients go on from what `held` gave after `step` steps."""
        for server in self.servers.values():
            self.mail += arrived(server.restart(step, values))
        for client in self.clients.values():
            client.restart(step, values)


def is_wanted(one: Outgoing, wanted: Receive) -> bool:
    frame = one.frame
    found = (frame.kind, frame.sender, frame.number, frame.round)
    return found == (wanted.kind, wanted.sender, wanted.number, wanted.round)


def assert_same(ones: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """The same names, and the same bits."""
    assert set(ones) == set(others)
    for name, tensor in ones.items():
        assert tensor.numpy().tobytes() == others[name].numpy().tobytes(), name
