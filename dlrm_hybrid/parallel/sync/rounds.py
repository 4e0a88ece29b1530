"""The elastic `sync` policy: a version is made from one push of each worker that is present.

As in lockstep, but a worker may leave and rejoin: a round ends when every worker present has
pushed or passed. The push of a worker that then leaves still counts. A worker that joins begins
with a pull, between two rounds, and is waited for from then on.

A worker numbers its own pushes and versions, as with `async`. Sums are in trainer order; the
learning rate is that of the pushes made before, of which one step has as many as there are
trainers; and while no worker is missing the bits are those of lockstep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from dlrm_hybrid.parallel.sync.policy import (
    Action,
    Average,
    BucketState,
    Exactly,
    Publish,
    Pull,
    Push,
    SyncPolicy,
    check_due,
)
from dlrm_hybrid.types import ConfigError, DlrmError, Version


@final
@dataclass(frozen=True, slots=True)
class Rounds(SyncPolicy):
    """Push n is computed with the version made of the worker's push n - 1, or with a later pull.

    Attributes:
        trainers: configured number; so many pushes are one step of the schedule.

    Raises:
        ConfigError: it is not positive.
    """

    trainers: int

    def __post_init__(self) -> None:
        if self.trainers < 1:
            raise ConfigError(f"parallel.trainers: {self.trainers} must be at least 1")

    @override
    def needs(self, pushed: int) -> Exactly:
        return Exactly(Version(pushed))

    @override
    def bucket(self, workers: Sequence[int], pushed: int) -> RoundsBucket:
        return RoundsBucket(self, tuple(workers), Version(pushed), frozenset(workers), {}, {})


@final
@dataclass(frozen=True, slots=True)
class RoundsBucket(BucketState):
    """A server's state of one bucket: the workers present, and the pushes of this round.

    Attributes:
        policy: that of the workers.
        workers: ranks that may push, in trainer order.
        applied: pushes since the run began.
        live: workers that a round waits for; at the start all, before they have pulled.
        due: of each worker that has pulled, the number of the push that must come next.
        arrived: workers heard in this round: True for a push, False for a pass.
    """

    policy: Rounds
    workers: tuple[int, ...]
    applied: Version
    live: frozenset[int]
    due: Mapping[int, int]
    arrived: Mapping[int, bool]

    @property
    @override
    def version(self) -> Version:
        return self.applied

    @override
    def on_pull(self, pull: Pull) -> RoundsBucket:
        what = f"pull of rank {pull.sender}"
        if pull.sender not in self.workers:
            raise DlrmError(f"{what}: workers here are {self.workers}")
        if self.arrived:
            raise DlrmError(f"{what}: rank {next(iter(self.arrived))} is in the middle of a round")
        due = {**self.due, pull.sender: pull.number}
        return replace(self, live=self.live | {pull.sender}, due=due)

    @override
    def on_push(self, push: Push) -> tuple[RoundsBucket, tuple[Action, ...]]:
        return self._take(push, "push", pushes=True)

    @override
    def on_pass(self, push: Push) -> tuple[RoundsBucket, tuple[Action, ...]]:
        return self._take(push, "pass", pushes=False)

    @override
    def on_leave(self, worker: int) -> tuple[RoundsBucket, tuple[Action, ...]]:
        return replace(self, live=self.live - {worker})._ended()

    def _take(
        self, push: Push, what: str, *, pushes: bool
    ) -> tuple[RoundsBucket, tuple[Action, ...]]:
        what, due = f"{what} {push.number} of rank {push.sender}", self.due.get(push.sender)
        if due is None or push.sender not in self.live:
            raise DlrmError(f"{what}: it must pull before it pushes")
        check_due(what, push.number, due)
        if push.sender in self.arrived:
            raise DlrmError(f"{what}: too early, push {due} is due when this round has ended")
        return replace(self, arrived={**self.arrived, push.sender: pushes})._ended()

    def _ended(self) -> tuple[RoundsBucket, tuple[Action, ...]]:
        """The state of the next round with its actions, if every worker present has been heard."""
        if not self.arrived or not self.live <= self.arrived.keys():
            return self, ()
        pushes = tuple(
            Push(worker, self.due[worker]) for worker in self.workers if self.arrived.get(worker)
        )
        actions: list[Action] = []
        if pushes:
            actions.append(Average(pushes, self.applied // self.policy.trainers))
        to = [worker for worker in self.workers if worker in self.live]
        actions += [Publish(Version(self.due[worker] + 1), (worker,)) for worker in to]
        due = {**self.due, **{worker: self.due[worker] + 1 for worker in to}}
        applied = Version(self.applied + len(pushes))
        return replace(self, applied=applied, due=due, arrived={}), tuple(actions)
