"""Random worlds of workers and one server, with frames in flight; every law of the policies."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.sync.lockstep import MakeVersion, Push, SendVersion, State, start, step
from dlrm_hybrid.parallel.sync.policy import Bounded, Policy, Sync
from dlrm_hybrid.types import ConfigError, DlrmError

policies = st.one_of(st.just(Sync()), st.builds(Bounded, st.integers(1, 4)))


@dataclass
class Worker:
    rank: int
    done: int = 0
    version: int = 0
    computed_with: list[int] = field(default_factory=list[int])
    sent: deque[Push] = field(default_factory=deque[Push])
    answers: deque[int] = field(default_factory=deque[int])


class World:
    """Workers that step when they may; frames keep their order between two ranks only."""

    def __init__(self, policy: Policy, trainers: int, stages: int, first: int, steps: int) -> None:
        self.policy = policy
        self.end = first + steps
        groups = {s: tuple(t * stages + s for t in range(trainers)) for s in range(stages)}
        self.state = start(policy, groups, first)
        self.workers = {
            rank: Worker(rank, done=first, version=policy.version(first))
            for rank in range(trainers * stages)
        }
        for worker in self.workers.values():
            worker.answers.extend(range(worker.version + 1, first + 1))
        self.groups = groups
        self.made: dict[int, list[int]] = {s: [] for s in range(stages)}

    def moves(self) -> list[tuple[str, int]]:
        found: list[tuple[str, int]] = []
        for worker in self.workers.values():
            wanted = self.policy.version(worker.done)
            if worker.done < self.end and worker.version == wanted:
                found.append(("compute", worker.rank))
            if worker.answers and worker.answers[0] <= wanted:
                found.append(("apply", worker.rank))
            if worker.sent:
                found.append(("arrive", worker.rank))
        return found

    def play(self, move: str, rank: int) -> None:
        worker = self.workers[rank]
        if move == "compute":
            worker.computed_with.append(worker.version)
            worker.sent.append(Push(rank, worker.done))
            worker.done += 1
        elif move == "apply":
            worker.version = worker.answers.popleft()
        else:
            self.state, actions = step(self.state, worker.sent.popleft())
            for action in actions:
                self.act(action)

    def act(self, action: MakeVersion | SendVersion) -> None:
        if isinstance(action, MakeVersion):
            arrived = [
                self.workers[rank].done - len(self.workers[rank].sent)
                for rank in self.groups[action.stage]
            ]
            assert min(arrived) > action.step, "made before every push of the step was there"
            self.made[action.stage].append(action.step + 1)
        else:
            assert self.made[action.stage][-1] == action.version
            assert action.to == self.groups[action.stage]
            for rank in action.to:
                self.workers[rank].answers.append(action.version)


@given(
    policy=policies,
    trainers=st.integers(1, 4),
    stages=st.integers(1, 3),
    first=st.sampled_from([0, 1, 7]),
    steps=st.integers(1, 6),
    data=st.data(),
)
def test_all_interleavings_keep_the_policy(
    policy: Policy, trainers: int, stages: int, first: int, steps: int, data: st.DataObject
):
    world = World(policy, trainers, stages, first, steps)
    choices = data.draw(st.randoms(use_true_random=False))
    while moves := world.moves():
        world.play(*choices.choice(moves))
    # Nothing can move any more: either all is done, or it is a deadlock.
    due = [policy.version(one) for one in range(first, world.end)]
    for worker in world.workers.values():
        assert worker.done == world.end
        assert worker.computed_with == due
        assert not worker.sent
        assert list(worker.answers) == list(range(worker.version + 1, world.end + 1))
    for made in world.made.values():
        assert made == list(range(first + 1, world.end + 1))
    if isinstance(policy, Sync):
        assert due == list(range(first, world.end))


GROUPS = {0: (0, 2), 1: (1, 3)}


def at(policy: Policy, *events: Push) -> State:
    state = start(policy, GROUPS, 0)
    for event in events:
        state, _ = step(state, event)
    return state


def test_the_last_push_of_a_step_makes_a_version():
    state, actions = step(start(Sync(), GROUPS, 0), Push(3, 0))
    assert actions == ()
    state, actions = step(state, Push(0, 0))
    assert actions == ()
    state, actions = step(state, Push(1, 0))
    assert actions == (MakeVersion(1, 0), SendVersion(1, 1, (1, 3)))
    assert [unit.version for unit in state.units] == [0, 1]


def test_under_bounded_staleness_a_worker_runs_ahead():
    state = at(Bounded(2), Push(0, 0), Push(0, 1), Push(0, 2))
    with pytest.raises(DlrmError, match="rank 0 for step 3: too early, it needs version 1"):
        step(state, Push(0, 3))
    state, actions = step(state, Push(2, 0))
    assert actions == (MakeVersion(0, 0), SendVersion(0, 1, (0, 2)))
    _, actions = step(state, Push(0, 3))
    assert actions == ()


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Push(4, 0)], "rank 4 for step 0: .* owns nothing"),
        ([Push(0, 0), Push(0, 0)], "rank 0 for step 0: it came before; step 1 is due"),
        ([Push(0, 1)], "rank 0 for step 1: too early, step 0 is due"),
        ([Push(0, 0), Push(0, 1)], "rank 0 for step 1: too early, it needs version 1 of stage 0"),
    ],
)
def test_pushes_out_of_turn_are_refused(events: list[Push], message: str):
    before = at(Sync(), *events[:-1])
    with pytest.raises(DlrmError, match=message):
        step(before, events[-1])


def test_staleness_below_one_is_refused():
    with pytest.raises(ConfigError, match=r"sync\.staleness: 0"):
        Bounded(0)
