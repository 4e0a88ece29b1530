"""Trainers that leave hand over what they have held back; others come in their place."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_world import SHAPES, World, drawn, gappy_gradients_of
from test_asynchronous_servers import HALF, Loose, assert_moved, dyadic, orders
from test_compressed_servers import sparsifier

from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.parallel.policies import Asynchronous


@given(trainers=st.integers(1, 4), in_flight=st.integers(1, 2), choices=orders)
@settings(max_examples=30)
def test_nothing_is_lost_where_trainers_leave_and_come_again(
    trainers: int, in_flight: int, choices: Random
):
    first = dyadic(drawn(0))
    world = World(
        trainers,
        Asynchronous(trainers, in_flight),
        servers=2,
        schedule=HALF,
        values=first,
        make=sparsifier(0.9),
        gradients=lambda trainer, step: dyadic(gappy_gradients_of(trainer, step)),
    )
    loose = Loose(world)
    given_sum = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for _ in range(25):
        rank = choices.choice(range(trainers))
        for name, gradient in world.gradients(rank, loose.pushed[rank]).items():
            given_sum[name] += gradient
        loose.step(rank)
        if choices.random() < 0.2:
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
    assert_moved(weights, first)
