"""When a server makes a version and whom it sends it to: a pure machine, without tensors.

A unit is all that one server owns of one stage; its version k + 1 is made from the pushes of step k
of all trainers, as soon as the last of them is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dlrm_hybrid.parallel.sync.policy import Policy
from dlrm_hybrid.types import DlrmError


@dataclass(frozen=True, slots=True)
class Push:
    """Event: the gradients of one step came from the worker with rank `sender`."""

    sender: int
    step: int


@dataclass(frozen=True, slots=True)
class MakeVersion:
    """Action: make the version `step + 1` of `stage` from the pushes of `step`."""

    stage: int
    step: int


@dataclass(frozen=True, slots=True)
class SendVersion:
    """Action: send the version just made to the workers of `stage`, in trainer order."""

    stage: int
    version: int
    to: tuple[int, ...]


Action = MakeVersion | SendVersion


@dataclass(frozen=True, slots=True)
class Unit:
    """What a server knows of the workers of one stage.

    Attributes:
        stage: the stage.
        workers: their ranks, in trainer order.
        version: newest version made.
        pushed: steps that have come from each worker, in the order of `workers`.
    """

    stage: int
    workers: tuple[int, ...]
    version: int
    pushed: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class State:
    """All units of one server, and the rule that says how far workers may run ahead."""

    policy: Policy
    units: tuple[Unit, ...]


def start(policy: Policy, groups: Mapping[int, Sequence[int]], step: int) -> State:
    """The state before `step`, with the version of that number made.

    Args:
        policy: the workers' policy.
        groups: ranks of the workers of each stage of which this server owns something.
        step: steps done; 0 at the beginning of a run.
    """
    units = (
        Unit(stage, tuple(workers), version=step, pushed=(step,) * len(workers))
        for stage, workers in sorted(groups.items())
    )
    return State(policy, tuple(units))


def step(state: State, event: Push) -> tuple[State, tuple[Action, ...]]:
    """The state after an event, and what to do now, in this order.

    Raises:
        DlrmError: the push is of a worker that has nothing here, has come before, comes before an
            earlier one, or was computed with a version that does not exist yet.
    """
    unit = next((unit for unit in state.units if event.sender in unit.workers), None)
    if unit is None:
        raise DlrmError(f"{_describe(event)}: this server owns nothing of that rank's stage")
    trainer = unit.workers.index(event.sender)
    _check_turn(event, unit, trainer, state.policy)
    pushed = tuple(count + (place == trainer) for place, count in enumerate(unit.pushed))
    version = min(pushed)
    actions: tuple[Action, ...] = ()
    if version > unit.version:
        actions = (
            MakeVersion(unit.stage, unit.version),
            SendVersion(unit.stage, version, unit.workers),
        )
    after = replace(unit, version=version, pushed=pushed)
    units = tuple(after if one is unit else one for one in state.units)
    return replace(state, units=units), actions


def _check_turn(event: Push, unit: Unit, trainer: int, policy: Policy) -> None:
    due = unit.pushed[trainer]
    if event.step < due:
        raise DlrmError(f"{_describe(event)}: it came before; step {due} is due")
    if event.step > due:
        raise DlrmError(f"{_describe(event)}: too early, step {due} is due")
    if policy.version(event.step) > unit.version:
        raise DlrmError(
            f"{_describe(event)}: too early, it needs version {policy.version(event.step)} "
            f"of stage {unit.stage}, which is at {unit.version}"
        )


def _describe(event: Push) -> str:
    return f"push of rank {event.sender} for step {event.step}"
