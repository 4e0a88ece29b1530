"""Servers that answer each push at once: any order of the pushes, workers that pull anew."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_world import OPTIMIZERS, SHAPES, World, assert_same, drawn, gappy_gradients_of, travel
from test_compressed_servers import sparsifier
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Dense
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.update import DenseUpdate, decode
from dlrm_hybrid.model.optimizer import Constant, Optimizer
from dlrm_hybrid.parallel.policies import Asynchronous, Lockstep
from dlrm_hybrid.types import ConfigError, DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import Dtype

PULLS = [Dtype.FLOAT32, Dtype.BFLOAT16]
HALF = Constant(base_lr=0.5)
Values = dict[str, Tensor]

orders = st.randoms(use_true_random=False)


def dyadic(values: Mapping[str, Tensor]) -> Values:
    """Multiples of 1/64 below 8: sums of hundreds of them are exact."""
    return {name: ((value * 64).round() / 64).clamp(-8, 8) for name, value in values.items()}


class Loose:
    """A world whose workers go on in any order; each answer is taken when it is needed."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.pushed = dict.fromkeys(world.clients, 0)
        for rank in world.clients:
            world.refresh(rank)

    def step(self, rank: int, gradients: Mapping[str, Tensor] | None = None) -> list[Frame]:
        """Pull and push; what the worker has pushed."""
        self.world.pull(rank)
        pushes = self.world.push(rank, self.pushed[rank], gradients)
        frames = [travel(push) for push in pushes]
        self.world.arrive(pushes)
        self.pushed[rank] += 1
        return frames

    def weights(self) -> Values:
        return {name: value for name, value in self.world.held().items() if name in SHAPES}


def assert_moved(values: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    for name, value in before.items():
        assert float((values[name] - value).abs().max()) > 1e-3, name


@given(
    trainers=st.integers(1, 4),
    in_flight=st.integers(1, 3),
    pull=st.sampled_from(PULLS),
    optimizer=st.sampled_from(OPTIMIZERS),
    sparsity=st.sampled_from([None, 0.9]),
    choices=orders,
)
@settings(max_examples=25)
def test_replicas_are_what_they_were_told_in_any_order(
    trainers: int,
    in_flight: int,
    pull: Dtype,
    optimizer: Optimizer,
    sparsity: float | None,
    choices: Random,
):
    # Each answer carries a digest of what its worker is to have: a client refuses another replica.
    world = World(
        trainers,
        Asynchronous(trainers, in_flight),
        optimizer=optimizer,
        servers=2,
        pull=pull,
        make=Dense if sparsity is None else sparsifier(sparsity),
        gradients=gappy_gradients_of,
    )
    loose = Loose(world)
    for _ in range(30):
        rank = choices.choice(range(trainers))
        match choices.choice(["step"] * 5 + ["refresh", "join"]):
            case "step":
                loose.step(rank)
            case "refresh":
                world.refresh(rank)
                assert_same(world.replicas[rank], loose.weights())
            case _:
                world.mail = [one for one in world.mail if one.to != rank]
                for value in world.replicas[rank].values():
                    value.fill_(torch.nan)
                loose.pushed[rank] = choices.randint(0, 40)
                world.clients[rank] = world.client(rank)
                world.clients[rank].restart(loose.pushed[rank], drawn(7))
                world.refresh(rank, whole=True)
                assert_same(world.replicas[rank], loose.weights())
    for rank in range(trainers):
        world.refresh(rank)
        assert_same(world.replicas[rank], loose.weights())
    assert not torch.equal(world.replicas[0]["bottom.1.bias"], drawn(0)["bottom.1.bias"])


@given(trainers=st.integers(1, 4), in_flight=st.integers(1, 2), choices=orders)
@settings(max_examples=20)
def test_weights_are_the_first_less_all_pushes_in_any_order(
    trainers: int, in_flight: int, choices: Random
):
    """Trainers that leave hand over what they have held back; others come in their place."""
    first = dyadic(drawn(0))
    world = World(
        trainers,
        Asynchronous(trainers, in_flight),
        servers=choices.choice([1, 2]),
        schedule=HALF,
        values=first,
        make=sparsifier(0.9),
        gradients=lambda trainer, step: dyadic(gappy_gradients_of(trainer, step)),
    )
    loose, has_left = Loose(world), False
    given_sum, pushed_sum = ({n: torch.zeros(s) for n, s in SHAPES.items()} for _ in range(2))
    names = {spec.id: spec.name for spec in world.specs(0)}
    for _ in range(25):
        rank = choices.choice(range(trainers))
        for name, gradient in world.gradients(rank, loose.pushed[rank]).items():
            given_sum[name] += gradient
        for push in loose.step(rank):
            update = decode(push.sections, "push")
            assert not isinstance(update, DenseUpdate)
            for place, section in enumerate(push.sections):
                first_k, end_k = update.offsets_E[place : place + 2]
                sum_N = pushed_sum[names[section.tensor]].view(-1).numpy()
                sum_N[update.indices_K[first_k:end_k]] += update.values_of(place)
        if choices.random() < 0.1:
            has_left = True
            world.drive(rank, world.clients[rank].flush())
            held = world.compressors[rank].tensors()
            assert not any(bool(held[f"{name}.residual"].any()) for name in SHAPES)
            assert not any(one.to == rank for one in world.mail)
            # Its servers have seen one push more than it had batches: whoever comes counts on.
            loose.pushed[rank] += 1
            world.compressors[rank] = sparsifier(0.9)(Layout(world.specs(rank)))
            world.clients[rank] = world.client(rank)
            world.clients[rank].join(loose.pushed[rank])
            world.refresh(rank, whole=True)
    weights = loose.weights()
    for name, gradient in given_sum.items():
        kept = sum(world.compressors[rank].tensors()[f"{name}.residual"] for rank in world.clients)
        assert torch.equal(weights[name], first[name] - 0.5 * (gradient - kept))
        assert has_left or torch.equal(gradient, pushed_sum[name] + kept)
        assert not torch.equal(gradient, pushed_sum[name])
    assert_moved(weights, first)


@given(trainers=st.integers(2, 4), choices=orders)
@settings(max_examples=20)
def test_an_answer_holds_what_differs_from_the_version_its_worker_has(
    trainers: int, choices: Random
):
    # Rising weights: an element that has moved differs.
    world = World(
        trainers,
        Asynchronous(trainers),
        schedule=HALF,
        values=dyadic(drawn(0)),
        gradients=lambda trainer, step: {
            name: -value.abs() for name, value in dyadic(gappy_gradients_of(trainer, step)).items()
        },
        make=sparsifier(0.5),
    )
    loose = Loose(world)
    has = {rank: loose.weights() for rank in world.clients}
    for _ in range(20):
        rank = choices.choice(range(trainers))
        loose.step(rank)
        weights = loose.weights()
        (answer,) = (one.frame for one in world.mail if one.to == rank)
        for section, (name, weight) in zip(answer.sections[:-1], weights.items(), strict=True):
            update = decode([section], "answer")
            differs_N = (weight != has[rank][name]).view(-1).numpy()
            if isinstance(update, DenseUpdate):
                assert differs_N.all()
                continue
            assert update.indices_K.tolist() == np.flatnonzero(differs_N).tolist()
            assert update.values_K.tolist() == weight.view(-1)[differs_N].tolist()
        has[rank] = weights
    assert_moved(weights, dyadic(drawn(0)))


def test_in_lockstep_no_staleness_is_counted():
    world = World(2, Lockstep(1))
    world.run(0, 3)
    assert world.servers[2].staleness() == {}


def pull_frame(world: World, rank: int, round_: int = 0, number: int = 0) -> Frame:
    return Frame(kind=Kind.PULL, sender=rank, attempt=0, number=number, round=round_)


def test_pulls_hold_everything_or_what_differs_in_float32():
    world = World(2, Asynchronous(2), pull=Dtype.BFLOAT16, make=sparsifier(0.95), check_every=100)
    loose = Loose(world)
    (server,) = world.servers.values()
    loose.step(0)
    whole, parts, none = (server.handle(pull_frame(world, 1, round_, 0))[0] for round_ in (0, 1, 1))
    elements = [
        sum(decode([one], "pull").values_of(0).size for one in out.frame.sections[:-1])
        for out in (whole, parts, none)
    ]
    assert elements == [467, 0, 0]
    loose.step(0)
    differs = server.handle(pull_frame(world, 1, 1, 5))[0].frame
    assert 0 < sum(decode([one], "pull").values_of(0).size for one in differs.sections[:-1]) < 100
    assert {one.dtype for one in differs.sections[:-1]} == {Dtype.FLOAT32}
    assert (differs.kind, differs.number, differs.round) == (Kind.PARAMETERS, 5, 1)
    # All of it, or parts: counted as any other version.
    assert server.versions().elements == 467 * 8
    with pytest.raises(DlrmError, match="too early, push 5 is due"):
        server.handle(replace(travel(world.push(1, 0)[0]), number=6))


def test_what_is_out_of_turn_is_refused_and_changes_nothing():
    world = World(2, Asynchronous(2))
    (server,) = world.servers.values()
    (push,) = world.push(0, 0)
    with pytest.raises(DlrmError, match="push 0 of rank 0: it must pull before it pushes"):
        server.handle(travel(push))
    server.handle(pull_frame(world, 0))
    before = world.held()
    with pytest.raises(DlrmError, match="push 3 of rank 0: too early, push 0 is due"):
        server.handle(replace(travel(push), number=3))
    assert_same(world.held(), before)
    server.handle(travel(push))
    after = world.held()
    assert_moved(after, before)
    with pytest.raises(DlrmError, match="push 0 of rank 0: it came before; push 1 is due"):
        server.handle(travel(push))
    assert_same(world.held(), after)
    with pytest.raises(DlrmError, match=r"pull 0 of worker-0.0 \(rank 0\): round 4 with 0 sect"):
        server.handle(pull_frame(world, 0, 4))
    with pytest.raises(DlrmError, match=r"pull 0 of nobody \(rank 9\): this server owns nothing"):
        server.handle(pull_frame(world, 9))


def test_what_all_must_be_sent_alike_is_refused():
    with pytest.raises(ConfigError, match=r"pull\.sparsity = 0\.9: trainers must all be sent"):
        World(2, Asynchronous(2), pull_sparsity=0.9)
    with pytest.raises(ConfigError, match=r"gradient\.pull=levels: trainers must all"):
        World(2, Asynchronous(2), publishes_means=True)
