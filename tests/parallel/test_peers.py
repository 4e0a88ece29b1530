"""Trainers without servers learn what trainers with one server learn, bit for bit."""

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from server_world import World, assert_same, gappy_gradients_of, is_wanted, travel
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Compressor, Dense
from dlrm_hybrid.compress.gradient.error_feedback import ErrorFeedback, FeedbackOptions
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.gradient.methods.dct import Dct
from dlrm_hybrid.compress.gradient.methods.topk import CountedThreshold
from dlrm_hybrid.compress.gradient.thresholded import ThresholdSelector
from dlrm_hybrid.model.optimizer import Adagrad, Momentum, Optimizer, Sgd
from dlrm_hybrid.parallel.dense.peers import PeerClient
from dlrm_hybrid.parallel.effects import Outgoing, Port
from dlrm_hybrid.parallel.policies import Lockstep
from dlrm_hybrid.telemetry.spans import SpanClock
from dlrm_hybrid.types import DivergedError, DlrmError
from dlrm_hybrid.wire.frame import Kind
from dlrm_hybrid.wire.section import Dtype

STEPS = 12
OPTIMIZERS: list[Optimizer] = [Sgd(), Momentum(momentum=0.9), Adagrad(eps=1e-10)]


def sparse(dtype: Dtype, *, levels: bool = False) -> Callable[[Layout], Compressor]:
    selector = ThresholdSelector(Dct(density=0.1, lifespan=4), CountedThreshold())
    options = FeedbackOptions(dtype=dtype, levels=levels)
    return lambda layout: ErrorFeedback(layout, selector, options)


METHODS = {
    "dense": Dense,
    "float32": sparse(Dtype.FLOAT32),
    "bfloat16": sparse(Dtype.BFLOAT16),
    "levels": sparse(Dtype.BFLOAT16, levels=True),
}


class Peers:
    """The same trainers as in a world with one server, without it."""

    def __init__(self, world: World, check_every: int = 1) -> None:
        self.topology = replace(world.topology, servers=0)
        self.mail: list[Outgoing] = []
        self.replicas = [
            {name: value.clone() for name, value in replica.items()} for replica in world.replicas
        ]
        self.clients = {
            rank: PeerClient(
                Port(topology=self.topology, rank=rank, attempt=0, transmit=self._transmit),
                *(world.tensors, self.replicas[rank // world.topology.stages]),
                *(world.options(check_every), world.compressors[rank], SpanClock()),
            )
            for rank in world.compressors
        }
        self._gradients = world.gradients

    def _transmit(self, to: int, frame, dense_equivalent_bytes: int) -> None:
        one = Outgoing(to, frame, dense_equivalent_bytes)
        self.mail.append(one._replace(frame=travel(one)))

    def pull(self, rank: int) -> None:
        program, answer = self.clients[rank].pull(), None
        while True:
            try:
                wanted = program.send(answer)
            except StopIteration:
                return
            found = next(one for one in self.mail if one.to == rank and is_wanted(one, wanted))
            self.mail.remove(found)
            answer = found.frame

    def push(self, rank: int, gradients: Mapping[str, Tensor]) -> None:
        assert list(self.clients[rank].push(gradients)) == []

    def run(self, first: int, end: int) -> list[dict[str, Tensor]]:
        """Steps of all trainers; what the last of them computed each step with."""
        used: list[dict[str, Tensor]] = []
        for step in range(first, end):
            for rank in self.clients:
                self.pull(rank)
            used.append({name: tensor.clone() for name, tensor in self.replicas[-1].items()})
            for rank in reversed(self.clients):  # what comes first does not matter
                self.push(rank, self._gradients(rank // self.topology.stages, step))
        return used


def world(trainers: int, method: str, optimizer: Optimizer, stages: int = 1) -> World:
    return World(
        trainers,
        Lockstep(),
        optimizer=optimizer,
        stages=stages,
        make=METHODS[method],
        gradients=gappy_gradients_of,
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("trainers", "stages"), [(2, 1), (3, 2)])
def test_trainers_without_servers_learn_what_those_with_one_do(
    trainers: int, stages: int, method: str, optimizer: Optimizer
) -> None:
    ours, theirs = (world(trainers, method, optimizer, stages) for _ in range(2))
    peers = Peers(ours)
    for mine, other in zip(peers.run(0, STEPS), theirs.run(0, STEPS), strict=True):
        assert_same(mine, other)
    for rank in peers.clients:
        peers.pull(rank)
    moved = {name: value - ours.replicas[0][name] for name, value in peers.replicas[0].items()}
    assert all(value.abs().max() > 1e-3 for value in moved.values())
    for replica in peers.replicas[1:]:
        assert_same(replica, peers.replicas[0])
    assert not peers.mail
    held = {
        name: value for client in peers.clients.values() for name, value in client.tensors().items()
    }
    assert_same(held, theirs.held())


def test_resumed_trainers_are_unbroken_ones() -> None:
    unbroken = Peers(world(2, "dense", Adagrad(eps=1e-10)))
    unbroken.run(0, 5)
    for rank in unbroken.clients:
        unbroken.pull(rank)
    saved = {name: value.clone() for name, value in unbroken.clients[1].tensors().items()}
    resumed = Peers(world(2, "dense", Adagrad(eps=1e-10)))
    for client in resumed.clients.values():
        client.restart(5, saved)
        assert client.settled() == 5
    for mine, other in zip(resumed.run(5, STEPS), unbroken.run(5, STEPS), strict=True):
        assert_same(mine, other)


def test_other_weights_are_noticed_where_they_are_compared() -> None:
    peers = Peers(world(2, "dense", Sgd()), check_every=3)
    peers.run(0, 2)
    for rank in peers.clients:
        peers.pull(rank)
    peers.clients[1].tensors()["top.1.weight"][0, 0] += 1
    peers.run(2, 3)  # push 2 is not compared
    with pytest.raises(
        DlrmError,
        match=r"worker-0\.0 \(rank 0\): push 3 of worker-1\.0 \(rank 1\): .* other weights",
    ):
        peers.run(3, 5)


def test_a_gradient_that_is_not_finite_is_named() -> None:
    peers = Peers(world(2, "dense", Sgd()))
    gradients = gappy_gradients_of(1, 0)
    peers.push(0, gappy_gradients_of(0, 0))
    peers.push(1, {**gradients, "top.1.weight": gradients["top.1.weight"] + torch.inf})
    for rank in peers.clients:
        with pytest.raises(DivergedError, match=r"top\.1\.weight from worker-1\.0 \(rank 1\)"):
            peers.pull(rank)


def test_several_others_are_sent_the_same_bytes() -> None:
    peers = Peers(world(3, "levels", Sgd()))
    peers.push(0, gappy_gradients_of(0, 0))
    assert [(one.to, one.frame.kind) for one in peers.mail] == [(1, Kind.PUSH), (2, Kind.PUSH)]
    assert peers.mail[0].frame == peers.mail[1].frame
