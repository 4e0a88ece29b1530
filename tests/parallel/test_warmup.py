"""Trainers that make their first steps together, and then each its own."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_world import World, assert_same, drawn

from dlrm_hybrid.model.optimizer import Adagrad, Constant, Joined, Linear
from dlrm_hybrid.parallel.sync.asynchronous import Asynchronous
from dlrm_hybrid.parallel.sync.lockstep import Lockstep
from dlrm_hybrid.parallel.sync.policy import (
    Action,
    Average,
    BucketState,
    Exactly,
    Publish,
    Pull,
    Push,
    SyncPolicy,
)
from dlrm_hybrid.parallel.sync.rounds import Rounds
from dlrm_hybrid.parallel.sync.warmup import Warmup
from dlrm_hybrid.types import ConfigError, DlrmError
from dlrm_hybrid.wire.section import Dtype

STEPS = 4


def step(world: World, number: int, ranks: list[int]) -> None:
    for rank in ranks:
        world.pull(rank)
        world.arrive(world.push(rank, number))


def refresh(world: World, *, alone: bool) -> None:
    for rank, client in world.clients.items():
        world.drive(rank, client.refresh(whole=False, alone=alone))


def assert_same_replicas(world: World, other: World) -> None:
    for one, same in zip(world.replicas, other.replicas, strict=True):
        assert_same(one, same)


@pytest.mark.parametrize("pull", [Dtype.FLOAT32, Dtype.BFLOAT16])
@pytest.mark.parametrize("optimizer", [None, Adagrad(eps=1e-8)])
@pytest.mark.parametrize(("trainers", "in_flight"), [(1, 1), (3, 1), (3, 2)])
def test_both_parts_have_the_bits_of_their_policies(
    trainers: int, in_flight: int, optimizer: Adagrad | None, pull: Dtype
) -> None:
    """Those of lock-step, then those of an asynchronous world that goes on from its weights."""
    first, then = Linear(base_lr=0.1, steps=20), Constant(base_lr=0.03)
    alone = Asynchronous(trainers, in_flight)

    def world(policy: SyncPolicy) -> World:
        schedule = Joined(first=first, steps=STEPS, then=then)
        return World(
            *(trainers, policy), servers=2, optimizer=optimizer, pull=pull, schedule=schedule
        )

    lockstep, own = world(Lockstep()), world(Warmup(STEPS, alone))
    refresh(own, alone=False)
    ranks = list(own.clients)
    for number in range(STEPS):
        step(lockstep, number, ranks)
        step(own, number, [*reversed(ranks)])
    for rank in ranks:
        lockstep.pull(rank)
        own.pull(rank)
    assert_same_replicas(lockstep, own)
    refresh(own, alone=True)
    before, loose = own.held(), world(alone)
    for server in loose.servers.values():
        assert server.restart(STEPS * trainers, before) == []
    for client in loose.clients.values():
        client.restart(STEPS, before)
    refresh(loose, alone=True)
    for rank in Random(1).choices(ranks, k=12):
        for one in (own, loose):
            step(one, one.clients[rank].pushed, [rank])
    assert_same(own.held(), loose.held())
    assert_same_replicas(own, loose)
    for weights in (drawn(0), before):
        assert not any(torch.equal(own.held()[name], weights[name]) for name in drawn(0))


class Both:
    """A world that warms up, and beside it the machine that each of its parts is to be like."""

    def __init__(self, trainers: int) -> None:
        self.alone = Asynchronous(trainers)
        self.workers = tuple(range(trainers))
        self.states: list[BucketState] = [
            policy.bucket(self.workers, 0)
            for policy in (Warmup(STEPS, self.alone), Rounds(trainers))
        ]
        self.due = dict.fromkeys(self.workers, 0)
        self.live = set(self.workers)
        self.is_alone = False
        self.pull()

    def part(self) -> None:
        self.is_alone = True
        self.states[1] = self.alone.bucket(self.workers, self.states[1].version)
        self.pull()

    def pull(self) -> None:
        for worker in sorted(self.live):
            pull = Pull(worker, self.due[worker], alone=self.is_alone)
            self.states = [state.on_pull(pull) for state in self.states]

    def act(self, worker: int, what: str) -> None:
        push = Push(worker, self.due[worker])
        self.due[worker] += 1
        acts = {
            "push": lambda state: state.on_push(push),
            "pass": lambda state: state.on_pass(push),
            "leave": lambda state: state.on_leave(worker),
        }
        if what == "leave":
            self.live.remove(worker)
        (first, found), (second, expected) = map(acts[what], self.states)
        self.states = [first, second]
        assert first.version == second.version
        assert list(found) == [self.timed(one) for one in expected]

    def timed(self, action: Action) -> Action:
        """With a learning rate of this part, whatever lost workers have pushed twice, or not."""
        if not isinstance(action, Average):
            return action
        number = action.number
        number = max(number, STEPS) if self.is_alone else min(number, STEPS - 1)
        return replace(action, number=number)


@given(trainers=st.integers(1, 4), choices=st.randoms(use_true_random=False))
@settings(max_examples=50)
def test_it_is_rounds_until_all_go_on_alone_whoever_is_lost(trainers: int, choices: Random) -> None:
    both = Both(trainers)
    for part in range(2):
        if part:
            both.part()
        for _ in range(choices.randrange(2 * STEPS)):
            for worker in choices.sample(sorted(both.live), len(both.live)):
                if len(both.live) > 1 and choices.random() < 0.05:
                    both.act(worker, "leave")
                else:
                    both.act(worker, "push" if part or choices.random() < 0.8 else "pass")


def test_only_who_goes_on_alone_need_not_wait_for_its_answer() -> None:
    policy = Warmup(STEPS, Asynchronous(2, in_flight=3))
    world = World(2, policy)
    refresh(world, alone=False)
    assert policy.needs(7) == Exactly(7) and policy.alone().needs(7) == Exactly(5)
    world.arrive(world.push(0, 0))
    with pytest.raises(DlrmError, match="push 1 with versions"):
        world.push(0, 1)
    world = World(2, policy)
    refresh(world, alone=True)
    for number in range(3):
        world.push(0, number)
    with pytest.raises(DlrmError, match="push 3 with versions"):
        world.push(0, 3)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"sync\.warmup_steps: 0 must be at least 1"):
        Warmup(0, Asynchronous(2))
    state: BucketState = Warmup(STEPS, Asynchronous(2)).bucket((0, 1), 0)
    state = state.on_pull(Pull(0, 0)).on_pull(Pull(1, 0))
    state, _ = state.on_push(Push(1, 0))
    with pytest.raises(DlrmError, match="pull of rank 0: it goes on alone, but rank 1 is in the"):
        state.on_pull(Pull(0, 0, alone=True))
    state, _ = state.on_push(Push(0, 0))
    state = state.on_pull(Pull(0, 1, alone=True))
    with pytest.raises(DlrmError, match="push 1 of rank 1: it must pull before it pushes"):
        state.on_push(Push(1, 1))
    with pytest.raises(DlrmError, match="pass of rank 0: nobody waits"):
        state.on_pass(Push(0, 1))
    state, actions = state.on_push(Push(0, 1))
    assert actions == (Average((Push(0, 1),), STEPS, staleness=0), Publish(2, (0,)))
