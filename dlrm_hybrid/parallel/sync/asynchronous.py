"""The `async` policy: every push makes a version at once, which is sent to its worker alone.

A worker numbers its own pushes; push n is answered with version n + 1 of that worker's own count,
which includes all other workers' pushes until then. So results depend on the order in
which pushes arrive, and on nothing else: the same order gives the same bits.

A worker begins with a pull, which says how often it has pushed before. It may pull again, with
another number too: a worker that rejoins sets its own.

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
        trainers: configured number; so many pushes are one step of the schedule.
        in_flight: a thread's most pushes without an answer while it computes on.
        threads: number per worker.

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
        """Most pushes of a worker without an answer when it pushes again."""
        return self.threads * self.in_flight

    @override
    def bucket(self, workers: Sequence[int], pushed: int) -> AsynchronousBucket:
        return AsynchronousBucket(self, tuple(workers), Version(pushed), {})


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a worker since its last pull.

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
    """A server's state of one bucket under `async`: the progress of each worker.

    Attributes:
        policy: that of the workers.
        workers: ranks that may push.
        applied: pushes since the run began.
        progress: that of each worker that has pulled.
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
        # No answer is kept to be sent again: channels neither lose nor repeat frames, and a worker
        # whose connection was lost pulls anew.
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
        """The progress of a push's worker, if that push is the next one."""
        what = f"push {push.number} of rank {push.sender}"
        progress = self.progress.get(push.sender)
        if progress is None:
            raise DlrmError(f"{what}: it must pull before it pushes")
        check_due(what, push.number, progress.due)
        return progress

    def _with(self, worker: int, progress: Progress) -> AsynchronousBucket:
        return replace(self, progress={**self.progress, worker: progress})
