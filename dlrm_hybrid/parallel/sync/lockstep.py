"""The `sync` and `bounded` policies: version k + 1 is made from the k-th push of every trainer.

Deterministic: a worker waits for one certain version and takes no newer one, and the pushes of a
version are summed in trainer order, whatever the order in which they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
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
class Lockstep(SyncPolicy):
    """Push k is computed with version max(0, k - staleness).

    Attributes:
        staleness: 0 is `sync`; with more, communication overlaps so many steps (`bounded`).

    Raises:
        ConfigError: `staleness` is negative.
    """

    staleness: int = 0

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise ConfigError(f"sync.staleness: {self.staleness} must be at least 0")

    @property
    @override
    def history(self) -> int:
        return self.staleness

    @property
    @override
    def shares_versions(self) -> bool:
        return True

    @override
    def needs(self, pushed: int) -> Exactly:
        return Exactly(Version(max(0, pushed - self.staleness)))

    @override
    def bucket(self, workers: Sequence[int], pushed: int) -> LockstepBucket:
        return LockstepBucket(self, tuple(workers), (pushed,) * len(workers))


@final
@dataclass(frozen=True, slots=True)
class LockstepBucket(BucketState):
    """A server's state of one bucket in lockstep: the number of pushes from each worker.

    Attributes:
        policy: that of the workers.
        workers: ranks, in trainer order.
        pushed: number received from each of them.
    """

    policy: Lockstep
    workers: tuple[int, ...]
    pushed: tuple[int, ...]

    @property
    @override
    def version(self) -> Version:
        return Version(min(self.pushed))

    @override
    def on_push(self, push: Push) -> tuple[LockstepBucket, tuple[Action, ...]]:
        trainer = self.workers.index(push.sender)
        self._check_due(push, self.pushed[trainer])
        pushed = tuple(count + (index == trainer) for index, count in enumerate(self.pushed))
        after = replace(self, pushed=pushed)
        if after.version == self.version:
            return after, ()
        number = self.version
        pushes = tuple(Push(worker, number) for worker in self.workers)
        return after, (Average(pushes, number), Publish(after.version, self.workers))

    @override
    def on_pull(self, pull: Pull) -> LockstepBucket:
        raise DlrmError(
            f"pull of rank {pull.sender}: in lock-step versions come without being asked for"
        )

    @override
    def on_pass(self, push: Push) -> tuple[LockstepBucket, tuple[Action, ...]]:
        raise DlrmError(f"pass of rank {push.sender}: in lock-step everybody pushes")

    @override
    def on_leave(self, worker: int) -> tuple[LockstepBucket, tuple[Action, ...]]:
        raise DlrmError(f"rank {worker} has left: in lock-step nobody goes on without it")

    def _check_due(self, push: Push, due: int) -> None:
        what = f"push {push.number} of rank {push.sender}"
        check_due(what, push.number, due)
        needed = self.policy.needs(push.number).version
        if needed > self.version:
            raise DlrmError(
                f"{what}: too early, it needs version {needed}; the newest is {self.version}"
            )
