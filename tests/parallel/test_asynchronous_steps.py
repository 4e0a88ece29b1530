"""Whole steps of workers whose servers answer each push at once."""

import pytest
import torch
from tiny_world import SMALL, Layout, TinyWorld, draw_batch, shares

from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.policies import Asynchronous, Lockstep


def refresh(world: TinyWorld, *, whole: bool = False) -> None:
    clients = [worker.client for worker in world.workers]
    world._run_programs([one.refresh(whole) for one in clients if isinstance(one, ServerClient)])


@pytest.mark.parametrize("cuts", [(), ("bottom.2", "top.2")])
def test_for_one_trainer_it_is_sync_bit_for_bit(cuts: tuple[str, ...]) -> None:
    sync, loose = (
        TinyWorld(SMALL, Layout(cuts=cuts, servers=2, policy=policy))
        for policy in (Lockstep(), Asynchronous(1))
    )
    refresh(loose)
    before = {name: one.clone() for name, one in sync.tensors().items()}
    for step in range(10):
        batch = draw_batch(SMALL, 16, step)
        assert sync.step(step, [batch])[-1] == loose.step(step, [batch])[-1]
        if step == 4:
            # At rest it can be saved, and another world goes on from there.
            refresh(loose)
            state = loose.save(step + 1)
            loose = TinyWorld(SMALL, Layout(cuts=cuts, servers=2, policy=Asynchronous(1)))
            loose.load(step + 1, state)
            refresh(loose)
    found = loose.tensors()
    for name, tensor in sync.tensors().items():
        assert torch.equal(found[name], tensor), name
        assert not torch.equal(before[name], tensor), name


@pytest.mark.parametrize("in_flight", [1, 2])
def test_trainers_learn_and_each_is_answered_alone(in_flight: int) -> None:
    # Every answer carries a digest: a replica that missed something would stop the world.
    world = TinyWorld(SMALL, Layout(trainers=3, servers=1, policy=Asynchronous(3, in_flight)))
    refresh(world, whole=True)
    losses: list[float] = []
    for step in range(30):
        outcomes = world.step(step, shares(draw_batch(SMALL, 48, step), 3))
        losses.append(sum(one.loss_sum for one in outcomes) / 48)
    for trainer in range(3):
        answers = [one.frame.number for one in world.sent if (one.sender, one.to) == (3, trainer)]
        assert answers == list(range(31))
    assert sum(losses[-5:]) < sum(losses[:5])
    (server,) = world.servers
    staleness = server.staleness()
    assert list(staleness) == [0, 1, 2]
    assert all(one.count == 30 and one.largest <= 3 * in_flight for one in staleness.values())
    refresh(world)
    masters = server.tensors()
    for worker in world.workers:
        for name, weight in worker.stage.model.dense_parameters().items():
            assert torch.equal(weight, masters[name]), name
