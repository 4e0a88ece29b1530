"""Servers that make a version of what those push that are there."""

import pytest
import torch
from server_world import World, assert_same, drawn, travel
from torch import Tensor

from dlrm_hybrid.model.optimizer import Adagrad, Constant
from dlrm_hybrid.parallel.policies import Lockstep, Rounds
from dlrm_hybrid.parallel.sync import Average, BucketState, Publish, Pull, Push
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.section import Dtype


def step(world: World, number: int, ranks: list[int]) -> None:
    for rank in ranks:
        world.pull(rank)
    world.arrive([push for rank in ranks for push in world.push(rank, number)])


@pytest.mark.parametrize("pull", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("optimizer", [None, Adagrad(eps=1e-8)])
@pytest.mark.parametrize("trainers", [1, 3])
def test_while_all_live_the_bits_are_those_of_lock_step(
    trainers: int, optimizer: Adagrad | None, pull: Dtype
) -> None:
    worlds = [
        World(trainers, policy, servers=2, stages=2, optimizer=optimizer, pull=pull)
        for policy in (Lockstep(), Rounds(trainers))
    ]
    lockstep, rounds = worlds
    for rank in rounds.clients:
        rounds.refresh(rank)
    for number in range(9):
        step(lockstep, number, list(lockstep.clients))
        step(rounds, number, list(reversed(rounds.clients)))  # they arrive in another order
    for world in worlds:
        for rank in world.clients:
            world.pull(rank)
    weights = [{k: v for k, v in world.held().items() if "publ" not in k} for world in worlds]
    assert_same(*weights)
    for one, other in zip(lockstep.replicas, rounds.replicas, strict=True):
        assert_same(one, other)
        assert not any(torch.equal(one[name], value) for name, value in drawn(0).items())


def test_who_has_left_is_in_no_mean_and_who_comes_again_is() -> None:
    """Dyadic values: sums are exact in any order."""
    drawn_at: dict[tuple[int, int], dict[str, Tensor]] = {}

    def gradients(trainer: int, number: int) -> dict[str, Tensor]:
        values = drawn(1000 * trainer + number + 1)
        drawn_at[trainer, number] = {name: (8 * v).round() / 8 for name, v in values.items()}
        return drawn_at[trainer, number]

    start = {name: (64 * value).round() / 64 for name, value in drawn(0).items()}
    world = World(4, Rounds(4), gradients=gradients, schedule=Constant(base_lr=0.5), values=start)
    (server,) = world.servers.values()
    for rank in world.clients:
        world.refresh(rank)
    step(world, 0, [0, 1, 2, 3])
    for rank in range(4):
        world.pull(rank)
    world.arrive([*world.push(3, 1), *world.push(0, 1)])
    world.mail.clear()
    assert server.leave(2) == []  # others have not pushed yet
    last = server.leave(1)
    assert [one.to for one in last] == [0, 3]  # nobody waits for the dead any more
    assert server.leave(3) == []
    world.mail += [one._replace(frame=travel(one)) for one in last if one.to == 0]
    step(world, 2, [0])
    world.pull(0)
    world.clients[2].join(40)
    world.refresh(2, whole=True)
    step(world, 3, [2, 0])
    for rank in (0, 2):
        world.pull(rank)
    rounds = [[(0, 0), (1, 0), (2, 0), (3, 0)], [(0, 1), (3, 1)], [(0, 2)], [(0, 3), (2, 3)]]
    for name, value in start.items():
        for pushes in rounds:
            value = value - 0.5 * sum(drawn_at[push][name] for push in pushes) / len(pushes)
        for replica in (world.replicas[0], world.replicas[2], server.weights(0)):
            assert torch.equal(replica[name], value)


def test_who_passes_takes_its_turn_and_is_sent_the_version() -> None:
    world = World(2, Rounds(2), servers=2, schedule=Constant(base_lr=0.5))
    for rank in world.clients:
        world.refresh(rank)
    before = {name: value.clone() for name, value in world.replicas[0].items()}

    def skip(rank: int) -> None:
        world._out.clear()
        assert list(world.clients[rank].skip()) == []
        world.arrive([*world._out])

    skip(1)
    assert not world.mail
    world.arrive(world.push(0, 0))
    for rank in (0, 1):
        world.pull(rank)
    gradient = world.gradients(0, 0)
    for name, value in before.items():
        assert torch.equal(world.replicas[1][name], value - 0.5 * gradient[name])
    assert_same(*world.replicas)
    after = {name: value.clone() for name, value in world.replicas[0].items()}
    for rank in (0, 1):  # a round of nothing but passes changes nothing
        skip(rank)
    for rank in (0, 1):
        world.pull(rank)
        assert_same(world.replicas[rank], after)


def test_what_is_not_due_is_refused() -> None:
    state: BucketState = Rounds(2).bucket((1, 4), 6)
    with pytest.raises(DlrmError, match="push 0 of rank 4: it must pull before it pushes"):
        state.on_push(Push(4, 0))
    state = state.on_pull(Pull(1, 3)).on_pull(Pull(4, 5))
    with pytest.raises(DlrmError, match=r"pull of rank 2: workers here are \(1, 4\)"):
        state.on_pull(Pull(2, 0))
    state, actions = state.on_push(Push(4, 5))
    assert actions == ()
    with pytest.raises(DlrmError, match="push 5 of rank 4: too early, push 5 is due when"):
        state.on_push(Push(4, 5))
    with pytest.raises(DlrmError, match="pass 2 of rank 1: it came before; push 3 is due"):
        state.on_pass(Push(1, 2))
    with pytest.raises(DlrmError, match="pull of rank 1: rank 4 is in the middle of a round"):
        state.on_pull(Pull(1, 3))
    state, actions = state.on_push(Push(1, 3))
    mean = Average((Push(1, 3), Push(4, 5)), 3)
    assert actions == (mean, Publish(4, (1,)), Publish(6, (4,)))
    state, _ = state.on_leave(4)
    with pytest.raises(DlrmError, match="push 6 of rank 4: it must pull"):
        state.on_push(Push(4, 6))
