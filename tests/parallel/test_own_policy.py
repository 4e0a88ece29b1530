"""A sync policy of one's own, that of `outside_world`, which nothing else knows of."""

from random import Random

import pytest
import torch
from outside_world import OnArrivalPolicy
from test_policies import World
from tiny_world import SMALL, Layout, TinyWorld, draw_batch, shares

from dlrm_hybrid.parallel.policies import Lockstep


@pytest.mark.parametrize("cuts", [(), ("bottom.2", "top.2")])
def test_for_one_trainer_it_is_sync_bit_for_bit(cuts: tuple[str, ...]) -> None:
    worlds = [
        TinyWorld(SMALL, Layout(cuts=cuts, servers=2, policy=policy))
        for policy in (Lockstep(), OnArrivalPolicy(1))
    ]
    for step in range(10):
        losses = [world.step(step, [draw_batch(SMALL, 16, step)])[-1] for world in worlds]
        assert losses[0] == losses[1]
    expected, found = (world.tensors() for world in worlds)
    first = TinyWorld(SMALL, Layout(cuts=cuts, servers=2)).tensors()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(first[name], tensor), name


def test_every_push_of_every_trainer_is_applied_alone() -> None:
    # Every version carries a digest: a replica that missed one would stop the world.
    world = TinyWorld(SMALL, Layout(trainers=3, servers=1, policy=OnArrivalPolicy(3)))
    losses = []
    for step in range(30):
        outcomes = world.step(step, shares(draw_batch(SMALL, 48, step), 3))
        losses.append(sum(one.loss_sum for one in outcomes) / 48)
    published = [one.frame.number for one in world.sent if one.to == 0 and one.sender == 3]
    assert published == list(range(1, 91))
    assert sum(losses[-5:]) < sum(losses[:5])


@pytest.mark.parametrize("trainers", [1, 3])
def test_no_interleaving_is_a_deadlock_or_loses_a_push(trainers: int) -> None:
    for seed in range(20):
        world = World(OnArrivalPolicy(trainers), trainers, first=2, steps=4)
        choices = Random(seed)
        while moves := world.moves():
            world.play(*choices.choice(moves))
        assert all(one.pushed == world.end and not one.sent for one in world.workers.values())
        assert world.state.version == 6 * trainers
        assert len(set(world.averaged)) == len(world.averaged) == 4 * trainers
