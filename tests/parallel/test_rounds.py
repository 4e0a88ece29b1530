"""Rounds without sockets: workers of some stages that contribute, frames in flight."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_hybrid.parallel.collectives import Contribution, Reduce, RoundsState, begin_rounds, step
from dlrm_hybrid.types import DlrmError


@dataclass
class Worker:
    """Contributes, and waits for the result before it goes on."""

    rank: int
    at: tuple[int, int]
    waits: bool = False
    sent: deque[Contribution] = field(default_factory=deque[Contribution])
    answers: deque[Reduce] = field(default_factory=deque[Reduce])
    got: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])


@given(
    rounds=st.integers(1, 3),
    trainers=st.integers(1, 4),
    stages=st.integers(1, 3),
    first=st.sampled_from([0, 1, 7]),
    steps=st.integers(1, 4),
    choices=st.randoms(use_true_random=False),
)
def test_all_interleavings_give_every_result_once_and_in_order(
    rounds: int, trainers: int, stages: int, first: int, steps: int, choices
) -> None:
    groups = {s: tuple(t * stages + s for t in range(trainers)) for s in range(stages)}
    state = begin_rounds(rounds, groups)
    workers = {rank: Worker(rank, (first, 0)) for rank in range(trainers * stages)}
    made: dict[int, list[tuple[int, int]]] = {stage: [] for stage in groups}

    def moves() -> list[tuple[str, Worker]]:
        return [
            (move, worker)
            for worker in workers.values()
            for move, possible in (
                ("contribute", not worker.waits and worker.at[0] < first + steps),
                ("arrive", bool(worker.sent)),
                ("get", bool(worker.answers)),
            )
            if possible
        ]

    while possible := moves():
        move, worker = choices.choice(possible)
        if move == "contribute":
            worker.sent.append(Contribution(worker.rank, *worker.at))
            worker.waits = True
        elif move == "get":
            answer = worker.answers.popleft()
            assert (answer.push, answer.round) == worker.at
            worker.got.append(worker.at)
            number = worker.at[1] + 1
            worker.at = (worker.at[0] + number // rounds, number % rounds)
            worker.waits = False
        else:
            state, action = step(state, worker.sent.popleft())
            if action is not None:
                assert action.to == groups[action.stage]
                at = (action.push, action.round)
                for rank in action.to:
                    assert workers[rank].at == at, "made before every worker had contributed"
                    assert not workers[rank].sent
                    workers[rank].answers.append(action)
                made[action.stage].append(at)
    expected = [(one, number) for one in range(first, first + steps) for number in range(rounds)]
    assert all(results == expected for results in made.values())
    assert all(worker.got == expected for worker in workers.values())


def after(*events: Contribution) -> RoundsState:
    state = begin_rounds(2, {0: (0, 2), 1: (1, 3)})
    for event in events:
        state, _ = step(state, event)
    return state


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ([Contribution(4, 0, 0)], "rank 4 to push 0, round 0: the stage of that rank"),
        ([Contribution(0, 0, 0), Contribution(0, 0, 0)], "rank 0 to push 0, .*: it came before"),
        ([Contribution(0, 0, 1)], "rank 0 to push 0, round 1: push 0, round 0 is due"),
        ([Contribution(0, 3, 0), Contribution(2, 4, 0)], "rank 2 to push 4, .*: push 3, round 0"),
        ([Contribution(0, 3, 0), Contribution(2, 3, 0), Contribution(0, 4, 0)], "push 3, round 1"),
    ],
)
def test_contributions_out_of_turn_are_refused(events: list[Contribution], message: str) -> None:
    before = after(*events[:-1])
    with pytest.raises(DlrmError, match=message):
        step(before, events[-1])
