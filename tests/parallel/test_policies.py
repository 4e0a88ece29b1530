"""Random worlds of workers and one bucket, with frames in flight; every law of the sync policies.

A policy gets a row in `POLICIES`, and nothing else here; `test_own_policy` plays with its own.
"""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.policies import Asynchronous, Lockstep
from dlrm_hybrid.parallel.sync import (
    Average,
    BucketState,
    Exactly,
    Publish,
    Pull,
    Push,
    SyncPolicy,
    resumed_version,
)
from dlrm_hybrid.types import ConfigError, DlrmError

POLICIES: list[SyncPolicy] = [
    *(Lockstep(staleness) for staleness in range(5)),
    *(
        Asynchronous(trainers, in_flight)
        for trainers, in_flight in [(1, 1), (3, 1), (2, 2), (4, 3)]
    ),
    Asynchronous(2, threads=3),
]


@dataclass
class Worker:
    rank: int
    pushed: int = 0
    version: int = 0
    computed_with: list[int] = field(default_factory=list[int])
    sent: deque[Push] = field(default_factory=deque[Push])
    answers: deque[int] = field(default_factory=deque[int])


class World:
    """Workers that push when they may; frames keep their order between two ranks only."""

    def __init__(self, policy: SyncPolicy, trainers: int, first: int, steps: int) -> None:
        self.policy = policy
        self.end = first + steps
        self.ranks = tuple(range(10, 10 + 2 * trainers, 2))
        self.state: BucketState = policy.bucket(self.ranks, first)
        start, newest = resumed_version(policy, first), policy.settled(first)
        self.start = start
        if policy.shares_versions:
            assert self.state.version == newest
        else:
            assert start == newest
            self.state = policy.bucket(self.ranks, trainers * first)
            for rank in self.ranks:
                self.state = self.state.on_pull(Pull(rank, first))
            assert self.state.version == trainers * first
        self.workers = {rank: Worker(rank, pushed=first, version=start) for rank in self.ranks}
        for worker in self.workers.values():
            worker.answers.extend(range(start + 1, newest + 1))
        self.averaged: list[Push] = []

    def moves(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for worker in self.workers.values():
            needs = self.policy.needs(worker.pushed)
            exact = isinstance(needs, Exactly)
            needed = max(needs.version, self.start)
            fits = worker.version == needed if exact else worker.version >= needed
            if worker.pushed < self.end and fits:
                found.append(("compute", worker.rank))
            if worker.answers and (not exact or worker.answers[0] <= needs.version):
                found.append(("apply", worker.rank))
            if worker.sent:
                found.append(("arrive", worker.rank))
        return found

    def play(self, move: str, rank: int) -> None:
        worker = self.workers[rank]
        if move == "compute":
            exact = isinstance(self.policy.needs(worker.pushed), Exactly)
            if exact and self.policy.shares_versions:
                assert worker.version >= self.state.version - self.policy.history
            worker.computed_with.append(worker.version)
            worker.sent.append(Push(rank, worker.pushed))
            worker.pushed += 1
        elif move == "apply":
            worker.version = worker.answers.popleft()
        else:
            before = self.state.version
            self.state, actions = self.state.on_push(worker.sent.popleft())
            assert [type(one) for one in actions] in ([], [Average, Publish])
            assert self.state.version == before + bool(actions)
            for action in actions:
                self.act(action, rank)

    def act(self, action: Average | Publish, sender: int) -> None:
        if isinstance(action, Average):
            arrived = {rank: one.pushed - len(one.sent) for rank, one in self.workers.items()}
            assert all(one.number < arrived[one.sender] for one in action.pushes)
            self.averaged += action.pushes
        else:
            own = self.workers[sender].pushed - len(self.workers[sender].sent)
            alone = (own, (sender,))
            together = (self.state.version, self.ranks)
            expected = together if self.policy.shares_versions else alone
            assert (action.version, action.to) == expected
            for rank in action.to:
                self.workers[rank].answers.append(action.version)


@given(
    policy=st.sampled_from(POLICIES),
    trainers=st.integers(1, 4),
    first=st.sampled_from([0, 1, 7]),
    steps=st.integers(1, 6),
    choices=st.randoms(use_true_random=False),
)
def test_no_interleaving_is_a_deadlock_or_loses_a_push(
    policy: SyncPolicy, trainers: int, first: int, steps: int, choices
):
    world = World(policy, trainers, first, steps)
    while moves := world.moves():
        world.play(*choices.choice(moves))
    # Nothing can move any more: either all is done, or it is a deadlock.
    for worker in world.workers.values():
        assert (worker.pushed, len(worker.sent)) == (world.end, 0)
        due = [policy.needs(number) for number in range(first, world.end)]
        for version, needs in zip(worker.computed_with, due, strict=True):
            needed = max(needs.version, world.start)
            assert version >= needed
            assert version == needed or not isinstance(needs, Exactly)
    pushes = world.end if policy.shares_versions else trainers * world.end
    assert world.state.version == policy.settled(pushes)
    assert sorted((one.sender, one.number) for one in world.averaged) == [
        (rank, number) for rank in world.ranks for number in range(first, world.end)
    ]


def test_lockstep_needs_the_version_that_the_staleness_says():
    for policy in (Lockstep(), Lockstep(1), Lockstep(3)):
        needs = [policy.needs(number) for number in range(6)]
        assert needs == [Exactly(max(0, number - policy.staleness)) for number in range(6)]


def at(policy: Lockstep, *pushes: Push) -> BucketState:
    state: BucketState = policy.bucket((0, 2), 0)
    for push in pushes:
        state, _ = state.on_push(push)
    return state


def test_the_last_push_of_a_number_makes_a_version_in_trainer_order():
    state, actions = Lockstep().bucket((1, 3), 0).on_push(Push(3, 0))
    assert (state.version, actions) == (0, ())
    state, actions = state.on_push(Push(1, 0))
    assert actions == (Average((Push(1, 0), Push(3, 0)), 0), Publish(1, (1, 3)))
    assert state.version == 1


def test_under_bounded_staleness_a_worker_runs_ahead():
    state = at(Lockstep(2), Push(0, 0), Push(0, 1), Push(0, 2))
    with pytest.raises(DlrmError, match="push 3 of rank 0: too early, it needs version 1"):
        state.on_push(Push(0, 3))
    state, actions = state.on_push(Push(2, 0))
    assert actions == (Average((Push(0, 0), Push(2, 0)), 0), Publish(1, (0, 2)))
    _, actions = state.on_push(Push(0, 3))
    assert actions == ()


@pytest.mark.parametrize(
    ("pushes", "message"),
    [
        ([Push(0, 0), Push(0, 0)], "push 0 of rank 0: it came before; push 1 is due"),
        ([Push(0, 1)], "push 1 of rank 0: too early, push 0 is due"),
        ([Push(0, 0), Push(0, 1)], "push 1 of rank 0: too early, it needs version 1; .* is 0"),
    ],
)
def test_pushes_out_of_turn_are_refused(pushes: list[Push], message: str):
    before = at(Lockstep(), *pushes[:-1])
    with pytest.raises(DlrmError, match=message):
        before.on_push(pushes[-1])


def test_in_lockstep_nobody_pulls():
    with pytest.raises(DlrmError, match="pull of rank 2: in lock-step versions come without"):
        Lockstep().bucket((0, 2), 0).on_pull(Pull(2, 0))


def test_a_negative_staleness_is_refused():
    with pytest.raises(ConfigError, match=r"sync\.staleness: -1"):
        Lockstep(-1)
