"""`sync` of those that are there: a version is made from one push of each worker that lives.

As in lock-step, but a worker may leave and come again: a round ends when everybody that is there
has pushed, or has said that it passes. What has come from a worker that then left counts. Who comes
begins with a pull, and is waited for from then on; no round may have begun then.

A worker numbers its own pushes and versions, as with `async`. Sums are in trainer order, and the
learning rate is that of the pushes made before: so many as there are trainers are one step, and
while all live the bits are those of lock-step.
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
        trainers: that the run is configured for; so many pushes are one step of the schedule.

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
    """Who is there, and what has come in this round.

    Attributes:
        policy: of the workers.
        workers: ranks that may push, in trainer order.
        applied: pushes since the run began.
        live: workers that a round waits for; at the start all, before they have pulled.
        due: of each worker that has pulled, the number of the push that must come next.
        arrived: of each worker that has had its turn in this round, whether it has pushed.
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
        """The next round, if this one has all that are there."""
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
