"""The leader of workers in lock-step: one of them, which gives orders to the others.

Its steps need no orders of their own: an order to train leads to the step where something is due
again, and all workers make the same steps.

it sends:      orders to train on so many batches from a position,   DECISION
               to finish the batches in flight, to lower rates,
               to evaluate, to end
it receives:   how many orders a worker has done, with its sums      REPORT
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any, final

from typing_extensions import override

from dlrm_hybrid.data.loader import LoaderState, ReadAhead
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train.engine import Engine, Holder, Show
from dlrm_hybrid.train.progress import SYNC_EVERY, Decision, Plan, Progress
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import ScoredPart
from dlrm_hybrid.wire.frame import Kind


@final
@dataclass(slots=True, kw_only=True)
class LockstepLeader(Engine):
    """The engine of the worker that leads, and with it of all workers.

    Attributes:
        own: the worker.
        plan: plan of the run.
        read: reads the worker's batches.
    """

    own: WorkerRank
    plan: Plan
    read: ReadAhead
    schedule: LrSchedule = field(init=False)
    _followers: Sequence[int] = field(init=False)
    _ordered: int = 0  # number of orders
    _reported: int = 0  # number of reports that have been taken from each follower
    _until: int = 0  # step to which the last order to train leads
    _steps: int = 0  # number since the last meeting
    _severity: int = 0

    def __post_init__(self) -> None:
        self.schedule = self.own.schedule
        workers = range(self.own.topology.num_workers)
        self._followers = [rank for rank in workers if rank != self.own.messenger.rank]

    @property
    @override
    def holder(self) -> Holder:
        return self.own

    @override
    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        if step >= self._until:
            self._until = self.plan.next_meeting(step)
            self._order("learn", at=astuple(at), steps=self._until - step)
        self._steps += 1
        batch, after, coming = self.read(at)
        return self.own.learn(batch, coming), after

    @override
    def drain(self) -> StepMetrics | None:
        if self.own.is_stale:
            self._order("drain")
        return self.own.drain()

    @override
    def lower(self, step: int) -> None:
        self._order("lower", step=step)
        self.own.lower(step)

    @override
    def meet(
        self, progress: Progress, plan: Plan, stop: StopRequest, is_late: bool
    ) -> tuple[Progress, Decision]:
        """Add what all workers report, once they have done their orders; see `Engine.meet`."""
        if not plan.meets(progress.step):
            return progress, Decision()
        rows, self._steps = plan.samples_per_step * self._steps, 0
        progress = progress.plus(self.own.take_interval(), Interval(sent_rows=rows))
        progress = progress.plus(*self._reports())
        self._severity = max(stop.severity, self._severity)
        return progress, plan.decision(progress, self._severity, is_late)

    @override
    def evaluate(self, part: ScoredPart, stop: StopRequest, show: Show) -> BinaryScores:
        rank, trainers = self.own, range(self.own.topology.trainers)
        rows = len(rank.rows[part].rows)

        def meet(number: int, done_rows: int) -> None:
            show(done_rows, rows)
            if number % SYNC_EVERY == 0:
                self._stop_together(number, stop)

        self._order("evaluate", part=part.value, trainers=[*trainers])
        scores = rank.scores(part, trainers, meet)
        assert scores is not None, "the leader has them"
        return scores

    def end(self) -> None:
        """Order all workers to end, as this one does, once they have done their orders."""
        severity = self._severity  # not of signals that came too late to stop the run
        self._reports()
        self._order("end", severity=severity)

    def _order(self, do: str, **values: Any) -> None:
        """Give all other workers an order."""
        for rank in self._followers:
            self.own.messenger.send(rank, Kind.DECISION, self._ordered, {"do": do, **values})
        self._ordered += 1

    def _reports(self) -> list[Interval]:
        """Wait until all others have done their orders; returns the sums of each since then."""
        sums: list[Interval] = []
        for rank in self._followers:
            interval = Interval()
            for number in range(self._reported, self._ordered + 1):
                report = self.own.messenger.receive(rank, Kind.REPORT, number)
                interval = interval.plus(Interval(**report["interval"]))
                self._severity = max(report["severity"], self._severity)
            sums.append(interval)
        self._reported = self._ordered + 1
        return sums

    def _stop_together(self, number: int, stop: StopRequest) -> None:
        """Stop here if any worker must, before the group of batches of this number."""
        messenger = self.own.messenger
        requests = [messenger.receive(rank, Kind.STOP_REQUEST, number) for rank in self._followers]
        severities = [request["severity"] for request in requests]
        self._severity = max(stop.severity, *severities, self._severity)
        for rank in self._followers:
            messenger.send(rank, Kind.STOP_DECISION, number, {"severity": self._severity})
        obey(self._severity)
