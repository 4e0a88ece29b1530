"""The state machine of collective rounds, pure and without tensors.

Before each push come some rounds. In a round every worker of the stage contributes once; when the
last has, all get the same result, and may contribute to the next round or, after the last one, to
the next push. A run begins with the push of the first contribution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlrm_hybrid.types import DlrmError


@dataclass(frozen=True, slots=True)
class Contribution:
    """Event: a worker's sections for a round before a push have arrived."""

    sender: int
    push: int
    round: int


@dataclass(frozen=True, slots=True)
class Reduce:
    """Action: reduce all contributions to a round, and send the result to `to`.

    Attributes:
        stage: whose workers contributed.
        push: counted from 0.
        round: before that push, counted from 0.
        to: ranks of the workers of the stage, in trainer order.
    """

    stage: int
    push: int
    round: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The workers of one stage.

    Attributes:
        stage: the stage.
        workers: their ranks, in trainer order.
        push: that of the open round; None before the first contribution.
        round: the open one.
        contributed: ranks whose contributions have come.
    """

    stage: int
    workers: tuple[int, ...]
    push: int | None
    round: int
    contributed: frozenset[int]


@dataclass(frozen=True, slots=True)
class State:
    """Progress of all stages that reduce on one server, with `rounds` before each push."""

    rounds: int
    groups: tuple[Group, ...]


def start(rounds: int, workers: Mapping[int, Sequence[int]]) -> State:
    """The state before the first contribution.

    Args:
        rounds: number before each push, at least 1.
        workers: ranks of the workers of each stage that reduces here, in trainer order.
    """
    groups = (
        Group(stage, tuple(ranks), push=None, round=0, contributed=frozenset())
        for stage, ranks in sorted(workers.items())
    )
    return State(rounds, tuple(groups))


def step(state: State, event: Contribution) -> tuple[State, Reduce | None]:
    """The state after an event, and the action it calls for, if any.

    Raises:
        DlrmError: the contribution is of a worker that does not reduce here, has come before, or
            is not to the round that is open.
    """
    group = next((group for group in state.groups if event.sender in group.workers), None)
    if group is None:
        raise DlrmError(f"{_describe(event)}: the stage of that rank does not reduce here")
    due = (event.push if group.push is None else group.push, group.round)
    if (event.push, event.round) != due:
        raise DlrmError(f"{_describe(event)}: push {due[0]}, round {due[1]} is due")
    if event.sender in group.contributed:
        raise DlrmError(f"{_describe(event)}: it came before")
    after = replace(group, push=event.push, contributed=group.contributed | {event.sender})
    action = None
    if len(after.contributed) == len(group.workers):
        action = Reduce(group.stage, event.push, event.round, group.workers)
        round_ = (event.round + 1) % state.rounds
        push = event.push + (round_ == 0)
        after = replace(group, push=push, round=round_, contributed=frozenset())
    groups = tuple(after if one is group else one for one in state.groups)
    return replace(state, groups=groups), action


def _describe(event: Contribution) -> str:
    return f"contribution of rank {event.sender} to push {event.push}, round {event.round}"
