"""The sync policies: lock-step (`sync` and `bounded`), rounds (elastic `sync`), and `async`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from typing_extensions import override

from dlrm_hybrid.parallel.sync import (
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
class Lockstep(SyncPolicy):
    """Push k is computed with version max(0, k - staleness).

    Version k + 1 is made from the k-th push of every trainer. Deterministic: a worker waits for one
    certain version and takes no newer one, and the pushes of a version are summed in trainer order,
    whatever the order in which they arrive.

    Attributes:
        staleness: 0 is `sync`; with k > 0, communication overlaps k steps (`bounded`).

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
        policy: policy of the workers.
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


@final
@dataclass(frozen=True, slots=True)
class Rounds(SyncPolicy):
    """Push n is computed with the version made of the worker's push n - 1, or with a later pull.

    A version is made from one push of each worker that is present. As in lockstep, but a worker may
    leave and rejoin: a round ends when every worker present has pushed or passed. The push of a
    worker that then leaves still counts. A worker that joins begins with a pull, between two
    rounds, and is waited for from then on.

    A worker numbers its own pushes and versions, as with `async`. Sums are in trainer order; the
    learning rate follows the number of pushes before, of which one step has as many as there are
    trainers; and while no worker is missing the bits are those of lockstep.

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
        policy: policy of the workers.
        workers: ranks that may push, in trainer order.
        applied: pushes since the run began.
        live: workers that a round waits for; at the start all, before they have pulled.
        due: for each worker that has pulled, the number of the push that must come next.
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
        """The state of the next round with its actions, if every worker present is heard."""
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


@final
@dataclass(frozen=True, slots=True)
class Asynchronous(SyncPolicy):
    """Push n is computed with the answer to the worker's own push n - in_flight, or a later pull.

    Every push makes a version at once, which is sent to its worker alone. A worker numbers its own
    pushes; push n is answered with version n + 1 of that worker's own count, which includes all
    other workers' pushes until then. So results depend on the order in which pushes arrive, and on
    nothing else: the same order gives the same bits.

    A worker begins with a pull, which says how often it has pushed before. It may pull again, with
    another number too: a worker that rejoins sets its own.

    Threads of a worker share its count. Each waits for the answer to its own push; the staleness of
    pushes is counted as if threads took turns.

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
class WorkerProgress:
    """Progress of a worker since its last pull.

    Attributes:
        due: number of the push that must come next.
        sent: versions of the bucket in the last answers, the oldest first; its next push is
            computed with the oldest.
    """

    due: int
    sent: tuple[Version, ...]


@final
@dataclass(frozen=True, slots=True)
class AsynchronousBucket(BucketState):
    """A server's state of one bucket under `async`: the progress of each worker.

    Attributes:
        policy: policy of the workers.
        workers: ranks that may push.
        applied: pushes since the run began.
        progress: progress of each worker that has pulled.
    """

    policy: Asynchronous
    workers: tuple[int, ...]
    applied: Version
    progress: Mapping[int, WorkerProgress]

    @property
    @override
    def version(self) -> Version:
        return self.applied

    @override
    def on_pull(self, pull: Pull) -> AsynchronousBucket:
        if pull.sender not in self.workers:
            raise DlrmError(f"pull of rank {pull.sender}: workers here are {self.workers}")
        return self._with(pull.sender, WorkerProgress(pull.number, (self.applied,)))

    @override
    def on_push(self, push: Push) -> tuple[AsynchronousBucket, tuple[Action, ...]]:
        before = self._due(push)
        after = replace(self, applied=Version(self.applied + 1))
        # No answer is kept to be sent again: channels neither lose nor repeat frames, and a worker
        # whose connection was lost pulls anew.
        sent = (*before.sent, after.applied)[-self.policy.most_in_flight :]
        after = after._with(push.sender, WorkerProgress(push.number + 1, sent))
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

    def _due(self, push: Push) -> WorkerProgress:
        """The progress of a push's worker, if that push is the next one."""
        what = f"push {push.number} of rank {push.sender}"
        progress = self.progress.get(push.sender)
        if progress is None:
            raise DlrmError(f"{what}: it must pull before it pushes")
        check_due(what, push.number, progress.due)
        return progress

    def _with(self, worker: int, progress: WorkerProgress) -> AsynchronousBucket:
        return replace(self, progress={**self.progress, worker: progress})
