"""Random worlds of workers and one bucket, with frames in flight; every law of the sync policies.

A policy gets a row in `POLICIES`, and nothing else here; `test_own_policy` plays with its own.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.policies import Asynchronous, Lockstep, Rounds
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
                self.act(action, rank, before)

    def act(self, action: Average | Publish, sender: int, before: int) -> None:
        if isinstance(action, Average):
            arrived = {rank: one.pushed - len(one.sent) for rank, one in self.workers.items()}
            assert all(one.number < arrived[one.sender] for one in action.pushes)
            if isinstance(self.policy, Lockstep):  # of all, in the order of trainers
                number = {one.number for one in action.pushes} | {action.number}
                assert ([one.sender for one in action.pushes], number) == ([*self.ranks], {before})
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


@given(
    trainers=st.integers(1, 6),
    in_flight=st.integers(1, 3),
    version=st.sampled_from([0, 1, 12]),
    choices=st.randoms(use_true_random=False),
)
def test_an_async_push_makes_a_version_at_once_and_is_as_stale_as_what_came_between(
    trainers: int, in_flight: int, version: int, choices: Random
) -> None:
    """Also where workers pull anew, with counts of their own; what is not due changes nothing."""
    ranks = tuple(range(5, 5 + 3 * trainers, 3))
    state: BucketState = Asynchronous(trainers, in_flight).bucket(ranks, version)
    due: dict[int, int] = {}
    based: dict[int, list[int]] = {}  # the bucket's versions at a worker's pull and its answers

    def pull(rank: int, pushed: int) -> None:
        nonlocal state
        state = state.on_pull(Pull(rank, pushed))
        due[rank], based[rank] = pushed, [state.version]

    def push(rank: int) -> None:
        nonlocal state
        before, number = state.version, due[rank]
        staleness = before - based[rank][max(0, len(based[rank]) - in_flight)]
        state, actions = state.on_push(Push(rank, number))
        average = Average((Push(rank, number),), before // trainers, staleness)
        assert actions == (average, Publish(number + 1, (rank,)))
        assert state.version == before + 1
        due[rank] += 1
        based[rank].append(state.version)

    for rank in ranks:
        pull(rank, rank)
    for _ in range(60):
        rank = choices.choice(ranks)
        match choices.choice(["push"] * 3 + ["twice", "early", "pull"]):
            case "push":
                push(rank)
            case "pull":
                pull(rank, choices.randint(0, 50))
            case "early":
                with pytest.raises(DlrmError, match=f"too early, push {due[rank]} is due"):
                    state.on_push(Push(rank, due[rank] + choices.randint(1, 3)))
            case _ if len(based[rank]) > 1:
                number = due[rank] - choices.randint(1, len(based[rank]) - 1)
                with pytest.raises(DlrmError, match=f"push {number} of rank {rank}: it came befo"):
                    state.on_push(Push(rank, number))


def at(policy: SyncPolicy, *events: Push | Pull) -> BucketState:
    state: BucketState = policy.bucket((0, 2), 0)
    for event in events:
        state = state.on_pull(event) if isinstance(event, Pull) else state.on_push(event)[0]
    return state


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: at(Lockstep(), Push(0, 0), Push(0, 0)),
            "push 0 of rank 0: it came before; push 1 is due",
        ),
        (lambda: at(Lockstep(), Push(0, 1)), "push 1 of rank 0: too early, push 0 is due"),
        (
            lambda: at(Lockstep(2), *(Push(0, number) for number in range(4))),
            "push 3 of rank 0: too early, it needs version 1; .* is 0",
        ),
        (
            lambda: at(Lockstep(), Pull(2, 0)),
            "pull of rank 2: in lock-step versions come without",
        ),
        (lambda: at(Lockstep()).on_pass(Push(2, 0)), "pass of rank 2: in lock-step everybody push"),
        (
            lambda: at(Lockstep()).on_leave(2),
            "rank 2 has left: in lock-step nobody goes on without it",
        ),
        (
            lambda: at(Asynchronous(2)).on_pass(Push(2, 0)),
            "pass of rank 2: nobody waits for its pushes",
        ),
        (
            lambda: at(Asynchronous(2), Pull(0, 0), Push(2, 0)),
            "push 0 of rank 2: it must pull before it pushes",
        ),
        (lambda: at(Asynchronous(2), Pull(3, 0)), r"pull of rank 3: workers here are \(0, 2\)"),
    ],
)
def test_what_is_out_of_turn_is_refused(act: Callable[[], object], message: str) -> None:
    with pytest.raises(DlrmError, match=message):
        act()


def test_who_leaves_is_missed_by_nobody_who_waits_for_nobody() -> None:
    alone = at(Asynchronous(2))
    assert alone.on_leave(2) == (alone, ())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Lockstep(-1), r"sync\.staleness: -1"),
        (lambda: Asynchronous(0), r"parallel\.trainers: 0"),
        (lambda: Asynchronous(1, in_flight=0), r"sync\.in_flight: 0 must be at least 1"),
        (lambda: Asynchronous(1, threads=0), r"parallel\.threads: 0"),
        (lambda: Rounds(0), r"parallel\.trainers: 0"),
    ],
)
def test_counts_that_cannot_be_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
