"""Replay of an asynchronous run in one process, from its order logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from typing import final

from typing_extensions import override

from dlrm_hybrid.data.loader import LoaderState, with_coming
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.train.asynchronous.leases import Positions
from dlrm_hybrid.train.asynchronous.order_log import Gate, Taken
from dlrm_hybrid.train.asynchronous.pace import Pace, Trainers
from dlrm_hybrid.train.progress import Plan, Progress
from dlrm_hybrid.train.worker_rank import Learner
from dlrm_hybrid.types import DataError


@final
@dataclass(slots=True, kw_only=True)
class RecordedPace(Pace):
    """Recorded pace: all trainers from rest to rest, while gates keep the servers' order.

    Attributes:
        trainers: trainers of the world.
        plan: plan of the run.
        rests_on_record: steps of the recorded rests; consumed.
        leases: recorded leases of the leader; consumed.
        ahead: number of batches whose rows are prefetched.
        gates: gates of all servers.
        source: name of the record, for error messages.
    """

    trainers: Trainers
    plan: Plan
    rests_on_record: deque[int]
    leases: deque[Taken]
    ahead: int
    gates: Sequence[Gate]
    source: str
    _done: list[int] = field(init=False)
    _first: int = 0
    _rest: int = 0
    _positions: Positions = field(init=False)

    def __post_init__(self) -> None:
        self._positions = Positions(self.trainers.after)
        self._done = [0] * len(self.trainers.learners)

    @property
    @override
    def batches(self) -> tuple[int, ...]:
        return tuple(self._done)

    @override
    def restart(self, progress: Progress) -> None:
        raise DataError(f"sync.replay = {self.source!r}: plays a run back from its beginning only")

    @override
    def rests(self, step: int, soon: bool) -> bool:
        return step == self._rest

    @override
    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        metrics = StepMetrics()
        if step == self._rest:
            self._first, self._rest = step, self._next_rest(step)
            self._positions.begin(step, at)
            metrics = self._segment()
        return metrics, self._positions.of(step + 1)

    def _segment(self) -> StepMetrics:
        """Let all trainers train up to the next rest; returns their metrics."""
        leases = self._leases()
        if not self._first:
            self.trainers.refresh()
        outcomes = self.trainers.runner.run(
            {
                learner.worker.rank: self._learn(learner, leases[learner.trainer])
                for learner in chain.from_iterable(self.trainers.learners)
            }
        )
        # Trainers pull at each recorded rest, so frames due after a pull come through too.
        self.trainers.refresh()
        for trainer, of_trainer in enumerate(leases):
            self._done[trainer] += sum(lease.batches for lease in of_trainer)
        if self._rest == self.plan.steps:
            self._check_end()
        return reduce(StepMetrics.plus, outcomes.values())

    def _next_rest(self, step: int) -> int:
        recorded = self.rests_on_record.popleft() if self.rests_on_record else None
        if recorded != step or not self.rests_on_record:
            raise DataError(
                f"sync.replay = {self.source!r}: all are at rest at step {step}, on record is "
                f"{recorded}; only a run that was neither stopped nor resumed can be played back"
            )
        planned, rest = self.plan.next_rest(step), self.rests_on_record[0]
        if planned < rest:
            raise DataError(
                f"sync.replay = {self.source!r}: step {planned} has an evaluation, a checkpoint or "
                f"the end of the run, but on record all came to rest at step {rest} only; use its "
                "train.steps, train.evaluate_every and checkpoint.every"
            )
        return rest

    def _leases(self) -> list[list[Taken]]:
        """Leases up to the next rest, per trainer."""
        trainers = len(self.trainers.learners)
        leases: list[list[Taken]] = [[] for _ in range(trainers)]
        number = self._first * trainers
        while number < self._rest * trainers:
            if not self.leases or self.leases[0].number != number:
                record = self.leases[0].number if self.leases else "nothing"
                raise DataError(
                    f"sync.replay = {self.source!r}: batch {number} is due, on record is "
                    f"{record}; only a run that was neither stopped nor resumed can be played back"
                )
            lease = self.leases.popleft()
            leases[lease.sender].append(lease)
            number += lease.batches
        return leases

    def _learn(self, learner: Learner, leases: Sequence[Taken]) -> Program[StepMetrics]:
        metrics = StepMetrics()
        tick, trainers = self._done[learner.trainer], len(self.trainers.learners)
        numbers = (n for lease in leases for n in range(lease.number, lease.number + lease.batches))
        places = (divmod(number, trainers) for number in numbers)
        batches = (self.trainers.part(self._positions.of(step), part) for step, part in places)
        # In the run, rows may have been requested later at the end of a lease: gates hold them.
        for batch, coming in with_coming(batches, self.ahead):
            metrics = metrics.plus((yield from learner.learn(tick, batch, coming)))
            tick += 1
        return metrics

    def _check_end(self) -> None:
        """Check that every recorded message has arrived, and no other."""
        for gate in self.gates:
            faults = [("did not come", gate.due)] if gate.due is not None else []
            faults += [("is not on record", message) for message in gate.held]
            for fault, message in faults[:1]:
                raise DataError(
                    f"sync.replay = {self.source!r}: {message.kind.name} {message.number} of rank "
                    f"{message.sender} {fault}"
                )
