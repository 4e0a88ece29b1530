"""Collective rounds: the workers of a stage reduce through a server before each push.

Before each push come some rounds. In a round every worker of the stage contributes once; after the
last contribution all get the same result, and may contribute to the next round or, after the last
round, to the next push. A run begins with the push of the first contribution.

Contributions are gathered, reduced and answered here. All rounds of stage w go through server
w mod S, whichever servers own its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from dlrm_hybrid.compress.gradient.collective import Op, Sections, reduce
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import SectionError


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
        stage: the stage whose workers contributed.
        push: number of the push, counted from 0.
        round: number of the round before that push, counted from 0.
        to: ranks of the workers of the stage, in trainer order.
    """

    stage: int
    push: int
    round: int
    to: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StageRounds:
    """The workers of one stage.

    Attributes:
        stage: the stage.
        workers: their ranks, in trainer order.
        push: push of the open round; None before the first contribution.
        round: number of the open round.
        contributed: ranks that have contributed to it.
    """

    stage: int
    workers: tuple[int, ...]
    push: int | None
    round: int
    contributed: frozenset[int]


@dataclass(frozen=True, slots=True)
class RoundsState:
    """Progress of all stages that reduce on one server, with `rounds` before each push."""

    rounds: int
    groups: tuple[StageRounds, ...]


def begin_rounds(rounds: int, workers: Mapping[int, Sequence[int]]) -> RoundsState:
    """The state before the first contribution.

    Args:
        rounds: number before each push, at least 1.
        workers: ranks of the workers of each stage that reduces here, in trainer order.
    """
    groups = (
        StageRounds(stage, tuple(ranks), push=None, round=0, contributed=frozenset())
        for stage, ranks in sorted(workers.items())
    )
    return RoundsState(rounds, tuple(groups))


def step(state: RoundsState, event: Contribution) -> tuple[RoundsState, Reduce | None]:
    """The state after an event, and the action it calls for, if any.

    Raises:
        DlrmError: the contribution is from a worker that does not reduce here, has come before, or
            is not to the open round.
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
    groups = tuple(after if x is group else x for x in state.groups)
    return replace(state, groups=groups), action


def _describe(event: Contribution) -> str:
    return f"contribution of rank {event.sender} to push {event.push}, round {event.round}"


@final
class CollectiveServer:
    """Reduces the contributions of those stages whose rounds go through one server.

    Args:
        topology: ranks and roles of the world.
        index: which server this is.
        tensors: all dense tensors of the model.
        ops: operation of each round before a push, at least one.
        attempt: how often the run has been restarted.
    """

    def __init__(
        self,
        topology: Topology,
        index: int,
        tensors: Sequence[DenseTensor],
        ops: Sequence[Op],
        attempt: int,
    ) -> None:
        self._rank = topology.server(index)
        self._ops = ops
        self._attempt = attempt
        self._counts = _elements(tensors)
        here = [stage for stage in self._counts if topology.collective_server(stage) == self._rank]
        groups = {stage: topology.stage_group(stage) for stage in here}
        self._state = begin_rounds(len(ops), groups)
        self._contributed: dict[int, Sections] = {}

    def handle(self, frame: Frame) -> Sequence[Outgoing]:
        """Handle a CONTRIBUTION frame; returns the frames to send before the next call.

        Raises:
            DlrmError: a contribution is not due or not what the operation of its round takes; the
                message names rank and push.
        """
        if frame.attempt != self._attempt:
            raise DlrmError(
                f"contribution of rank {frame.sender} to push {frame.number}: of attempt "
                f"{frame.attempt}, expected {self._attempt}"
            )
        event = Contribution(frame.sender, frame.number, frame.round)
        self._state, action = step(self._state, event)
        self._contributed[frame.sender] = frame.sections
        return [] if action is None else self._reduce(action)

    def _reduce(self, action: Reduce) -> list[Outgoing]:
        contributions = [self._contributed.pop(worker) for worker in action.to]
        op, count = self._ops[action.round], self._counts[action.stage]
        try:
            result = reduce(op, contributions, action.push, count)
        except SectionError as error:
            raise DlrmError(
                f"contributions of stage {action.stage} to push {action.push}, round "
                f"{action.round}: {error}"
            ) from error
        frame = Frame(
            kind=Kind.RESULT,
            sender=self._rank,
            attempt=self._attempt,
            number=action.push,
            round=action.round,
            sections=result,
        )
        return [Outgoing(worker, frame, 0) for worker in action.to]


def _elements(tensors: Sequence[DenseTensor]) -> Mapping[int, int]:
    """Number of elements per stage."""
    counts: dict[int, int] = {}
    for tensor in tensors:
        counts[tensor.stage] = counts.get(tensor.stage, 0) + tensor.count
    return counts
