"""A schedule, a sync policy and an order as somebody writes them outside the package."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from typing_extensions import override

from dlrm_hybrid.bounds import Several
from dlrm_hybrid.compress.gradient.compressor import Compressor
from dlrm_hybrid.compress.gradient.context import StageContext
from dlrm_hybrid.compress.gradient.methods import GradientMethod
from dlrm_hybrid.compress.gradient.methods.none import NoCompression
from dlrm_hybrid.config.choices import Parallel, Sync
from dlrm_hybrid.parallel.schedule import Op, Schedule
from dlrm_hybrid.parallel.sync import (
    Action,
    AtLeast,
    Average,
    BucketState,
    Publish,
    Pull,
    Push,
    SyncPolicy,
)
from dlrm_hybrid.parallel.worker import Worker
from dlrm_hybrid.types import DlrmError, Version


@dataclass(frozen=True, kw_only=True)
class LateBackward(Schedule):
    """Forward of the batch just read, then backward of an older one.

    Attributes:
        late: steps between them.
    """

    late: Several = 1

    @override
    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        forwards = tuple(Op("F", microbatch) for microbatch in range(microbatches))
        backwards = (Op("B", microbatch, delay=self.late) for microbatch in range(microbatches))
        return (*forwards, *backwards)


@dataclass(frozen=True, kw_only=True)
class Backwards(Schedule):
    """A stage waits for gradients of what it has not sent."""

    @override
    def __call__(self, stage: int, stages: int, microbatches: int) -> tuple[Op, ...]:
        return (Op("B", 0), Op("F", 0))


@dataclass(frozen=True, kw_only=True)
class OnArrival(Sync):
    """Servers apply every push when it comes; trainers take the newest weights there are."""

    @override
    def policy(self, parallel: Parallel) -> SyncPolicy:
        return OnArrivalPolicy(parallel.trainers)


@dataclass(frozen=True)
class OnArrivalPolicy(SyncPolicy):
    trainers: int

    @property
    @override
    def shares_versions(self) -> bool:
        return True

    @override
    def needs(self, pushed: int) -> AtLeast:
        return AtLeast(Version(pushed))

    @override
    def settled(self, pushed: int) -> Version:
        return Version(self.trainers * pushed)

    @override
    def bucket(self, workers: Sequence[int], pushed: int) -> BucketState:
        return Arrivals(tuple(workers), self.settled(pushed))


@dataclass(frozen=True)
class Arrivals(BucketState):
    workers: tuple[int, ...]
    made: Version

    @property
    @override
    def version(self) -> Version:
        return self.made

    @override
    def on_push(self, push: Push) -> tuple[BucketState, tuple[Action, ...]]:
        after = replace(self, made=Version(self.made + 1))
        number = self.made // len(self.workers)
        return after, (Average((push,), number), Publish(after.made, self.workers))

    @override
    def on_pass(self, push: Push) -> tuple[BucketState, tuple[Action, ...]]:
        raise DlrmError("nobody passes")

    @override
    def on_leave(self, worker: int) -> tuple[BucketState, tuple[Action, ...]]:
        raise DlrmError("nobody leaves")

    @override
    def on_pull(self, pull: Pull) -> BucketState:
        raise DlrmError("nobody pulls")


@dataclass(frozen=True, kw_only=True)
class Alone(Sync):
    """Versions of each worker's own."""

    @override
    def policy(self, parallel: Parallel) -> SyncPolicy:
        class Own(OnArrivalPolicy):
            @property
            @override
            def shares_versions(self) -> bool:
                return False

        return Own(parallel.trainers)


class NoDataclass(Sync):
    @override
    def policy(self, parallel: Parallel) -> SyncPolicy:
        return OnArrivalPolicy(1)


@dataclass(frozen=True, kw_only=True)
class NoPolicy(Sync): ...


@dataclass(frozen=True, kw_only=True)
class Whole(GradientMethod):
    """Gradients as they are."""

    @override
    def build(self, context: StageContext) -> Compressor:
        return NoCompression().build(context)


def weight_norms(worker: Worker, power: float = 2.0) -> dict[str, float]:
    """The norm of each weight of a worker's stage, by name."""
    weights = worker.stage.model.dense_parameters()
    return {name: float(one.detach().norm(power)) for name, one in weights.items()}


def failing(worker: Worker) -> None:
    """Rank 1 cannot."""
    if worker.rank == 1:
        raise ValueError("no such weights")
