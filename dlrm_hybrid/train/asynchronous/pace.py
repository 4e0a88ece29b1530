"""Paces: the order in which trainers that do not wait for each other train in one process.

`SimulatedPace` draws from a seed how long each batch takes its trainer. A trainer looks up rows and
has its weights when it begins a batch, and pushes when that time is over; messages take no time. So
runs are reproducible and can be resumed, bit for bit, and their staleness follows from the times
alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import NamedTuple, Protocol, final

import numpy as np
from typing_extensions import override

from dlrm_hybrid.data.loader import Batch, LoaderState
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.parallel.worker import stage_inputs
from dlrm_hybrid.rng import fold
from dlrm_hybrid.train.asynchronous.leases import Leases, OwnPace, Positions
from dlrm_hybrid.train.progress import Plan, Progress
from dlrm_hybrid.train.worker_rank import Learner
from dlrm_hybrid.types import BatchNumber

SIGMA = 0.3  # standard deviation of the logarithm of a batch's time


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trainers:
    """All trainers of a world in one process.

    Attributes:
        learners: workers of each trainer, by stage.
        runner: runner of their programs.
        part: rows of a trainer's batch at a position; `Loader.part`.
        after: position of the next step's batches; `Loader.after`.
    """

    learners: Sequence[Sequence[Learner]]
    runner: InProcessRunner
    part: Callable[[LoaderState, int], Batch]
    after: Callable[[LoaderState], LoaderState]

    def refresh(self) -> None:
        """Make all replicas equal to the servers' weights; nothing is under way."""
        self.runner.run(
            {
                learner.worker.rank: learner.client.refresh(whole=False)
                for learner in chain.from_iterable(self.learners)
                if isinstance(learner.client, ServerClient)
            }
        )


class Pace(Protocol):
    """The order of trainers and batches; at rest all replicas equal the servers' weights."""

    @property
    def batches(self) -> tuple[int, ...]:
        """Number of batches done, per trainer."""
        ...

    def restart(self, progress: Progress) -> None:
        """Resume from there, at rest."""
        ...

    def rests(self, step: int, soon: bool) -> bool:
        """Whether nothing is under way after so many steps.

        Args:
            step: number of steps done.
            soon: whether the next rest should be soon.
        """
        ...

    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        """Let trainers train on as many batches as there are trainers.

        Args:
            step: number of steps done before.
            at: position of their batches.

        Returns:
            The metrics, and the position of the next step's batches.
        """
        ...


class _Begun(NamedTuple):
    """A batch that a trainer is working on until a simulated time."""

    until: float
    trainer: int
    batch: Batch


@final
@dataclass(slots=True, kw_only=True)
class SimulatedPace(Pace):
    """Simulated pace: batches in the order in which they would end.

    Attributes:
        trainers: trainers of the world.
        plan: plan of the run.
        seed: seed of the times.
        ahead: most batches that a trainer may be ahead of the slowest; None for no bound.
        slowness: factor of the time of batches, for some trainers by number.
    """

    trainers: Trainers
    plan: Plan
    seed: int
    ahead: int | None = None
    slowness: Mapping[int, float] = field(default_factory=dict[int, float])
    _leases: Leases = field(init=False)
    _begun: list[_Begun] = field(default_factory=list[_Begun])
    _positions: Positions = field(init=False)

    def __post_init__(self) -> None:
        self._positions = Positions(self.trainers.after)
        self._leases = Leases.begin((0,) * len(self.trainers.learners), OwnPace(self.ahead))

    @property
    @override
    def batches(self) -> tuple[int, ...]:
        return self._leases.done

    @override
    def restart(self, progress: Progress) -> None:
        done = tuple(progress.batches_of(n) for n in range(len(self.trainers.learners)))
        self._leases = Leases.begin(done, OwnPace(self.ahead))

    @override
    def rests(self, step: int, soon: bool) -> bool:
        if soon:
            self._leases = self._leases.soon()
        return step * len(self.trainers.learners) == self._leases.limit

    @override
    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        count = len(self.trainers.learners)
        if step * count == self._leases.limit:
            self._leases = self._leases.until(self.plan.next_rest(step) * count)
            self._positions.begin(step, at)
            self.trainers.refresh()
        if not self._begun:  # at rest
            for trainer in range(count):
                self._begin(trainer, 0.0)
        metrics = StepMetrics()
        for _ in range(count):
            now, trainer, batch = heapq.heappop(self._begun)
            metrics = metrics.plus(self._learn(trainer, batch))
            # With `ahead`, other trainers may have waited for this one.
            candidates = (trainer, *range(count)) if self.ahead else (trainer,)
            for candidate in candidates:
                if not self._leases.under_way[candidate]:
                    self._begin(candidate, now)
        return metrics, self._positions.of(step + 1)

    def _begin(self, trainer: int, now: float) -> None:
        """Let a trainer begin the next batch, if one is left."""
        self._leases, numbers = self._leases.take(trainer, most=1)
        for number in numbers:
            step, part = divmod(number, len(self.trainers.learners))
            batch = self.trainers.part(self._positions.of(step), part)
            count = self._leases.done[trainer]
            for worker in (learner.worker for learner in self.trainers.learners[trainer]):
                bags = stage_inputs(worker, batch).bags
                if worker.tables is not None and bags is not None:
                    worker.tables.prefetch(BatchNumber(count), worker.columns.by_table(bags))
            heapq.heappush(self._begun, _Begun(now + self._time(trainer, count), trainer, batch))

    def _learn(self, trainer: int, batch: Batch) -> StepMetrics:
        count = self._leases.done[trainer]
        outcomes = self.trainers.runner.run(
            {x.worker.rank: x.learn(count, batch) for x in self.trainers.learners[trainer]}
        )
        self._leases = self._leases.finish(trainer, count + 1)
        return reduce(StepMetrics.plus, outcomes.values())

    def _time(self, trainer: int, count: int) -> float:
        rng = np.random.default_rng(fold(self.seed, "pace", trainer, count))
        return float(rng.lognormal(0.0, SIGMA)) * self.slowness.get(trainer, 1.0)
