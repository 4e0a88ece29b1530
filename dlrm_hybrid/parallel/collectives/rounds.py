"""When the workers of a stage have agreed: a pure machine, without tensors.

In each step come some rounds, one after the other. In a round every worker of the stage proposes
once; when the last has, all get the same agreement, and may propose in the next round or, after the
last one, in the next step. A run begins with the step of the first proposal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlrm_hybrid.types import DlrmError


@dataclass(frozen=True, slots=True)
class Propose:
    """Event: what the worker with rank `sender` proposes in a round of a step has come."""

    sender: int
    step: int
    number: int


@dataclass(frozen=True, slots=True)
class Agree:
    """Action: make the agreement of a round from all its proposals, and send it to `to`.

    Attributes:
        stage: whose workers agree.
        step: counted from 0.
        number: of the round in its step, counted from 0.
        to: ranks of the workers of the stage, in trainer order.
    """

    stage: int
    step: int
    number: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """The workers of one stage.

    Attributes:
        stage: the stage.
        workers: their ranks, in trainer order.
        step: of the round that is open; None before the first proposal.
        number: of that round.
        proposed: ranks whose proposals have come.
    """

    stage: int
    workers: tuple[int, ...]
    step: int | None
    number: int
    proposed: frozenset[int]


@dataclass(frozen=True, slots=True)
class State:
    """All stages that agree here, and the rounds of each step."""

    rounds: int
    groups: tuple[Group, ...]


def start(rounds: int, workers: Mapping[int, Sequence[int]]) -> State:
    """The state before the first proposal.

    Args:
        rounds: of each step, at least 1.
        workers: ranks of the workers of each stage that agrees here, in trainer order.
    """
    groups = (
        Group(stage, tuple(ranks), step=None, number=0, proposed=frozenset())
        for stage, ranks in sorted(workers.items())
    )
    return State(rounds, tuple(groups))


def step(state: State, event: Propose) -> tuple[State, Agree | None]:
    """The state after an event, and what to do now.

    Raises:
        DlrmError: the proposal is of a worker that does not agree here, has come before, or is not
            of the round that is open.
    """
    group = next((group for group in state.groups if event.sender in group.workers), None)
    if group is None:
        raise DlrmError(f"{_describe(event)}: the stage of that rank does not agree here")
    due = (event.step if group.step is None else group.step, group.number)
    if (event.step, event.number) != due:
        raise DlrmError(f"{_describe(event)}: step {due[0]}, round {due[1]} is due")
    if event.sender in group.proposed:
        raise DlrmError(f"{_describe(event)}: it came before")
    after = replace(group, step=event.step, proposed=group.proposed | {event.sender})
    action = None
    if len(after.proposed) == len(group.workers):
        action = Agree(group.stage, event.step, event.number, group.workers)
        number = (event.number + 1) % state.rounds
        next_step = event.step + (number == 0)
        after = replace(group, step=next_step, number=number, proposed=frozenset())
    groups = tuple(after if one is group else one for one in state.groups)
    return replace(state, groups=groups), action


def _describe(event: Propose) -> str:
    return f"proposal of rank {event.sender} for step {event.step}, round {event.number}"
