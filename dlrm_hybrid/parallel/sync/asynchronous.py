"""`async`: every push makes a version as soon as it comes, and its worker alone is sent it.

A worker numbers its own pushes; push n is answered with version n + 1 of that worker's own count,
which holds all that other workers' pushes have changed meanwhile. So results depend on the order in
which pushes arrive, and on nothing else: the same order gives the same bits.

A worker begins with a pull, which says how often it has pushed before. It may pull again, also with
another number: whoever joins anew begins where it says.

Threads of a worker share its count. Each waits for the answer to its own push; the staleness of
pushes is counted as if threads took turns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from dlrm_hybrid.parallel.sync.policy import (
    Action,
    AtLeast,
    Average,
    BucketState,
    Exactly,
    Needs,
    Publish,
    Pull,
    Push,
    SyncPolicy,
    check_due,
)
from dlrm_hybrid.types import ConfigError, DlrmError, Version


@final
@dataclass(frozen=True, slots=True)
class Asynchronous(SyncPolicy):
    """Push n is computed with the answer to the worker's own push n - in_flight, or a later pull.

    Attributes:
        trainers: that the run is configured for; so many pushes are one step of the schedule.
        in_flight: pushes of a thread that may be without an answer while it computes on.
        threads: of a worker.

    Raises:
        ConfigError: one of them is not positive.
    """

    trainers: int
    in_flight: int = 1
    threads: int = 1

    def __post_init__(self) -> None:
        for key, value in (
            ("parallel.trainers", self.trainers),
            ("sync.in_flight", self.in_flight),
            ("parallel.threads", self.threads),
        ):
            if value < 1:
                raise ConfigError(f"{key}: {value} must be at least 1")

    @override
    def needs(self, pushed: int) -> Needs:
        version = Version(max(0, pushed - self.most_in_flight + 1))
        return Exactly(version) if self.threads == 1 else AtLeast(version)

    @property
    def most_in_flight(self) -> int:
        """Pushes of a worker that may be without an answer when it pushes again."""
        return self.threads * self.in_flight

    @override
    def bucket(self, workers: Sequence[int], pushed: int) -> AsynchronousBucket:
        return AsynchronousBucket(self, tuple(workers), Version(pushed), {})


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a worker has come since its last pull.

    Attributes:
        due: number of the push that must come next.
        sent: versions of the bucket in the last answers, the oldest first; its next push is
            computed with that one.
    """

    due: int
    sent: tuple[Version, ...]


@final
@dataclass(frozen=True, slots=True)
class AsynchronousBucket(BucketState):
    """What has come from each worker.

    Attributes:
        policy: of the workers.
        workers: ranks that may push.
        applied: pushes since the run began.
        progress: of each worker that has pulled.
    """

    policy: Asynchronous
    workers: tuple[int, ...]
    applied: Version
    progress: Mapping[int, Progress]

    @property
    @override
    def version(self) -> Version:
        return self.applied

    @override
    def on_pull(self, pull: Pull) -> AsynchronousBucket:
        if pull.sender not in self.workers:
            raise DlrmError(f"pull of rank {pull.sender}: workers here are {self.workers}")
        return self._with(pull.sender, Progress(pull.number, (self.applied,)))

    @override
    def on_push(self, push: Push) -> tuple[AsynchronousBucket, tuple[Action, ...]]:
        before = self._due(push)
        after = replace(self, applied=Version(self.applied + 1))
        # An answer to be sent again would have to be kept for each worker, and nobody waits for
        # it: channels lose and repeat nothing, and who has lost its connection pulls.
        sent = (*before.sent, after.applied)[-self.policy.most_in_flight :]
        after = after._with(push.sender, Progress(push.number + 1, sent))
        average = Average(
            (push,),
            number=self.applied // self.policy.trainers,
            staleness=self.applied - before.sent[0],
        )
        return after, (average, Publish(Version(push.number + 1), (push.sender,)))

    @override
    def on_pass(self, push: Push) -> tuple[AsynchronousBucket, tuple[Action, ...]]:
        raise DlrmError(f"pass of rank {push.sender}: nobody waits for its pushes")

    @override
    def on_leave(self, worker: int) -> tuple[AsynchronousBucket, tuple[Action, ...]]:
        return self, ()

    def _due(self, push: Push) -> Progress:
        """How far its worker has come, if it is the push that must come next."""
        what = f"push {push.number} of rank {push.sender}"
        progress = self.progress.get(push.sender)
        if progress is None:
            raise DlrmError(f"{what}: it must pull before it pushes")
        check_due(what, push.number, progress.due)
        return progress

    def _with(self, worker: int, progress: Progress) -> AsynchronousBucket:
        return replace(self, progress={**self.progress, worker: progress})
