"""Workers that push when they like, join again and are heard twice; every law of the machine."""

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.policies import Asynchronous
from dlrm_hybrid.parallel.sync import Average, BucketState, Exactly, Publish, Pull, Push
from dlrm_hybrid.types import ConfigError, DlrmError


@dataclass
class Worker:
    """A worker's own count, and the bucket's versions that the answers to it were made at."""

    pushed: int
    answers: deque[tuple[int, int]] = field(default_factory=deque[tuple[int, int]])
    told: list[int] = field(default_factory=list[int])
    has: tuple[int, int] = (0, 0)


class World:
    """One bucket; a push arrives as soon as it is sent, an answer when it is taken."""

    def __init__(self, trainers: int, in_flight: int, version: int) -> None:
        self.policy = Asynchronous(trainers, in_flight)
        self.ranks = tuple(range(5, 5 + 3 * trainers, 3))
        self.state: BucketState = self.policy.bucket(self.ranks, version)
        self.workers = {rank: Worker(rank) for rank in self.ranks}
        self.applied: list[tuple[Push, int]] = []
        self.first_version = version
        for rank in self.ranks:
            self.join(rank, rank)

    def join(self, rank: int, pushed: int) -> None:
        self.state = self.state.on_pull(Pull(rank, pushed))
        here = (pushed, self.state.version)
        self.workers[rank] = Worker(pushed, told=[self.state.version], has=here)

    def can_push(self, rank: int) -> bool:
        worker = self.workers[rank]
        return len(worker.answers) < self.policy.in_flight

    def push(self, rank: int) -> None:
        worker, before = self.workers[rank], self.state.version
        push = Push(rank, worker.pushed)
        self.state, actions = self.state.on_push(push)
        average, publish = actions
        assert isinstance(average, Average)
        assert average.pushes == (push,)
        assert average.number == before // self.policy.trainers
        assert publish == Publish(push.number + 1, (rank,))
        assert self.state.version == before + 1
        # With so many in flight it has computed with the newest answer it was allowed to have.
        assert average.staleness == before - worker.has[1]
        worker.pushed += 1
        worker.answers.append((publish.version, self.state.version))
        worker.told.append(self.state.version)
        self.applied.append((push, self.state.version))

    def take(self, rank: int) -> None:
        worker = self.workers[rank]
        number, version = worker.answers.popleft()
        assert number == worker.has[0] + 1
        worker.has = (number, version)


moves = st.randoms(use_true_random=False)


@given(
    trainers=st.integers(1, 4),
    in_flight=st.integers(1, 3),
    version=st.sampled_from([0, 1, 12]),
    choices=moves,
)
def test_every_push_makes_one_version_whatever_the_order(
    trainers: int, in_flight: int, version: int, choices: Random
) -> None:
    world = World(trainers, in_flight, version)
    for _ in range(40):
        rank = choices.choice(world.ranks)
        worker = world.workers[rank]
        match choices.choice(["push", "push", "push", "twice", "early", "join"]):
            case "push":
                # What the policy lets it compute with is what it takes first.
                needs = world.policy.needs(worker.pushed)
                assert isinstance(needs, Exactly)
                while worker.answers and worker.has[0] < needs.version:
                    world.take(rank)
                assert world.can_push(rank)
                world.push(rank)
            case "twice" if worker.told[1:]:
                before = world.state
                number = worker.pushed - choices.randint(1, len(worker.told) - 1)
                with pytest.raises(DlrmError, match=f"push {number} of rank {rank}: it came befo"):
                    world.state.on_push(Push(rank, number))
                assert world.state is before
            case "early":
                number = worker.pushed + choices.randint(1, 3)
                with pytest.raises(DlrmError, match=f"too early, push {worker.pushed} is due"):
                    world.state.on_push(Push(rank, number))
            case "join":
                world.join(rank, choices.randint(0, 50))
            case _:
                pass
    # Versions have no holes, and each has one push.
    assert [made for _, made in world.applied] == list(
        range(version + 1, version + 1 + len(world.applied))
    )
    for worker in world.workers.values():
        assert worker.told == sorted(set(worker.told))


@given(trainers=st.integers(1, 6), in_flight=st.integers(1, 3), choices=moves)
def test_the_staleness_of_all_pushes_is_what_was_pushed_between(
    trainers: int, in_flight: int, choices: Random
) -> None:
    state: BucketState = Asynchronous(trainers, in_flight).bucket(range(trainers), 3)
    for rank in range(trainers):
        state = state.on_pull(Pull(rank, 0))
    pushed = [0] * trainers
    staleness = [0] * trainers
    based = [[3] for _ in range(trainers)]  # version of each answer, the pull's first
    for _ in range(60):
        rank = choices.choice(range(trainers))
        base = based[rank][max(0, pushed[rank] - in_flight + 1)]
        state, (average, _) = state.on_push(Push(rank, pushed[rank]))
        assert isinstance(average, Average)
        assert average.staleness == state.version - 1 - base
        staleness[rank] += average.staleness
        pushed[rank] += 1
        based[rank].append(state.version)
    if in_flight == 1:
        # Every version made while somebody computed counts for all others that computed: the
        # mean is T - 1, less what is still to be counted at the end.
        open_at_the_end = sum(state.version - answers[-1] for answers in based)
        assert sum(staleness) == (trainers - 1) * 60 - open_at_the_end


def test_the_rate_counts_versions_of_the_bucket_by_the_configured_trainers():
    state: BucketState = Asynchronous(trainers=2).bucket((0, 1), 4)
    state = state.on_pull(Pull(1, 9))
    numbers: list[int] = []
    for number in range(9, 14):
        state, (average, publish) = state.on_push(Push(1, number))
        assert isinstance(average, Average)
        numbers.append(average.number)
        assert publish == Publish(number + 1, (1,))
    assert numbers == [2, 2, 3, 3, 4]


def test_a_worker_must_pull_before_it_pushes():
    state = Asynchronous(2).bucket((0, 2), 0)
    with pytest.raises(DlrmError, match="push 0 of rank 2: it must pull before it pushes"):
        state.on_pull(Pull(0, 0)).on_push(Push(2, 0))
    with pytest.raises(DlrmError, match=r"pull of rank 3: workers here are \(0, 2\)"):
        state.on_pull(Pull(3, 0))


def test_after_a_pull_no_answer_from_before_counts():
    state: BucketState = Asynchronous(1, in_flight=2).bucket((0,), 0).on_pull(Pull(0, 0))
    for number in range(3):
        state, (average, _) = state.on_push(Push(0, number))
    assert average == Average((Push(0, 2),), 2, staleness=1)
    state = state.on_pull(Pull(0, 3))
    _, (average, _) = state.on_push(Push(0, 3))
    assert average == Average((Push(0, 3),), 3, staleness=0)


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 1, 1), r"parallel\.trainers: 0"),
        ((1, 0, 1), r"sync\.in_flight: 0 must be at least 1"),
        ((1, 1, 0), r"parallel\.threads: 0"),
    ],
)
def test_counts_below_one_are_refused(counts: tuple[int, int, int], message: str):
    with pytest.raises(ConfigError, match=message):
        Asynchronous(*counts)
