"""A worker process: its part in steps, decisions, evaluations and checkpoints.

The worker of trainer 0 that holds tables leads: it receives the reports of the others, decides,
commits checkpoints, gathers scores, and alone has something to record. All do the same things at
the same steps, because these follow from the plan and from the leader's decisions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.data.loader import Batch, LoaderState, ReadAhead
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.parallel.dense.client import LocalClient, ServerClient
from dlrm_hybrid.parallel.finite import check_weights, is_check_due
from dlrm_hybrid.parallel.messages import Messenger, piece_of, values_of
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.parallel.step import StepMetrics, drain, train_step
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.parallel.worker import (
    Worker,
    flight,
    load_flight,
    stage_inputs,
)
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.engine import Engine, Show
from dlrm_hybrid.train.evaluation import WorldEvaluation
from dlrm_hybrid.train.progress import SYNC_EVERY, Decision, Plan, Progress
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.types import ScoredPart, Tick, Version
from dlrm_hybrid.wire.frame import Kind

Values = Mapping[str, Any]
Reports = Sequence[Values]


@dataclass(frozen=True, slots=True)
class _Met:
    """Step and traffic of a worker at the last meeting."""

    step: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0


@final
@dataclass(slots=True, kw_only=True)
class WorkerRank(Engine):
    """The engine of one worker in a world of processes.

    Attributes:
        topology: ranks and roles of the world.
        messenger: to the other ranks.
        runner: that of the worker's programs.
        worker: the worker's stage, boundaries and clients.
        client: that of its weights.
        compression: its compressors.
        tables: the pieces of tables that it holds.
        reads: reads a training batch of its trainer and those coming; none if orders bring them.
        schedule: learning rate of the dense parameters, to report it.
        evaluation: its part in evaluations.
        leader: rank that decides for all workers.
        lowered: first steps of lower learning rates.
        traffic: that of training steps so far; see `RankMeter.steps_traffic`.
        step: number of steps done.
        emptied: the last step at which no batch was in flight.
    """

    topology: Topology
    messenger: Messenger
    runner: ProcessRunner
    worker: Worker
    client: ServerClient | LocalClient
    compression: Compression
    tables: Sequence[Piece]
    reads: Sequence[ReadAhead]
    schedule: LrSchedule
    evaluation: WorldEvaluation
    traffic: Callable[[], tuple[int, int]]
    leader: int
    lowered: list[int]
    step: int = 0
    emptied: int = 0
    _met: _Met = _Met()

    @override
    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        (read,) = self.reads
        batch, after, coming = read(at)
        return self.learn(batch, coming), after

    @override
    def lower(self, step: int) -> None:
        """Lower learning rates from this step on; servers know before they can apply it.

        They wait for all trainers, so it is enough if each stage of one of them sends it.
        """
        self.lowered.append(step)
        if self.worker.rank < self.topology.stages:
            for server in self.topology.all_servers:
                self.messenger.send(server, Kind.LOWER, step, {})

    @override
    def drain(self, step: int) -> StepMetrics | None:
        if not self._is_stale:
            return None
        metrics = self.runner.run(drain(self.worker, step))
        self.emptied = step
        return metrics

    def learn(self, batch: Batch, coming: Sequence[Batch] = ()) -> StepMetrics:
        """Make one step.

        Args:
            batch: its rows.
            coming: those of the next steps, as far as its tables look ahead.
        """
        step = self.step
        program = train_step(self.worker, Tick(step), stage_inputs(self.worker, batch, coming))
        metrics = self.runner.run(program)
        if isinstance(self.client, LocalClient) and is_check_due(step, len(batch.label_B)):
            rates = {
                "optimizer.lr": self.schedule.lr(step),
                "embedding.lr": self.worker.embedding_schedule.lr(step),
            }
            check_weights(step, self.worker.name, self.client.weights, self.client.tensors, rates)
        self.step = step + 1
        return metrics

    @override
    def meet(
        self, progress: Progress, plan: Plan, stop: StopRequest, is_late: bool
    ) -> tuple[Progress, Decision]:
        """Send the sums of all workers to the leader; see `Engine.meet`.

        All workers get the same decision at the same step; only the leader's clock counts.
        """
        step = progress.step
        if not plan.meets(step):
            return progress, Decision()
        progress = progress.plus(self.since_last_met(step, plan.samples_per_step))

        def decide(reports: Reports) -> Values:
            nonlocal progress
            progress = progress.plus(*(Interval(**report["interval"]) for report in reports))
            return asdict(plan.decision(progress, _highest(stop, reports), is_late))

        report = {"interval": asdict(progress.interval), "severity": stop.severity}
        decision = self._decision(Kind.REPORT, Kind.DECISION, step, report, decide)
        if not self.leads:
            progress = replace(progress, interval=Interval())
        return progress, Decision(*(decision[one.name] for one in fields(Decision)))

    @override
    def evaluate(
        self,
        part: ScoredPart,
        stop: StopRequest,
        show: Show,
        trainers: Sequence[int] | None = None,
    ) -> BinaryScores | None:
        """Score as `Engine.evaluate`, by these trainers; None: all."""
        rows = len(self.evaluation.rows[part].rows)

        def meet(number: int, done_rows: int) -> None:
            show(done_rows, rows)
            self._meet_evaluating(number, stop)

        if trainers is None:
            trainers = range(self.topology.trainers)
        return self.evaluation.scores(part, self.leader, self.masters(trainers), trainers, meet)

    @override
    def agree(self, step: int, is_best: bool) -> bool:
        if not self.leads:
            return self.messenger.receive(self.leader, Kind.DECISION, step)["is_best"]
        for rank in range(self.topology.num_workers):
            if rank != self.leader:
                self.messenger.send(rank, Kind.DECISION, step, {"is_best": is_best})
        return is_best

    def masters(self, trainers: Sequence[int]) -> Mapping[str, Tensor]:
        """The master weights and mean statistics of its stage, for evaluations by these trainers.

        All of their workers call it together.
        """
        stage = self.worker.part.index
        if isinstance(self.client, ServerClient):
            own = self.messenger.fetch(self.topology.server_group, self.settled(), stage)
        else:
            own = self.client.tensors()
        ranks = [self.topology.worker(trainer, stage) for trainer in trainers]
        model = self.worker.stage.model
        return {**own, **statistics.exchanged(self.messenger, ranks, model, self.step)}

    @override
    def pieces(self) -> list[Piece]:
        trainer = self.worker.rank // self.topology.stages
        held = self.compression.tensors() | statistics.named(trainer, self.worker.stage.model)
        if self.worker.tables is not None:
            held |= self.runner.run(self.worker.tables.state_ahead())
        if isinstance(self.client, LocalClient):
            held |= self.client.tensors()
        held |= self.runner.run(flight(self.worker, self.step, self.emptied))
        return [*full_pieces(held), *self.tables]

    def server_pieces(self) -> Iterator[Piece]:
        """Yield copies of the weights and optimizer state that servers hold, in parts."""
        for server in self.topology.all_servers:
            number = 0
            while True:
                wanted = {"part": number, "step": self.step, "pushed": self.pushed()}
                frame = self.messenger.ask(
                    server, Kind.FETCH, self.settled(), wanted, by=Kind.WEIGHTS
                )
                if number == values_of(frame)["count"]:
                    break
                yield piece_of(frame)
                number += 1

    @property
    @override
    def asked(self) -> Sequence[int]:
        return self.topology.all_servers

    @property
    def _is_stale(self) -> bool:
        """Whether steps leave batches in flight."""
        return self.worker.pipeline.most_in_flight > 0

    @override
    def pushed(self) -> Sequence[int] | None:
        if not self._is_stale:
            return None
        stages, pushed = range(self.topology.stages), self.worker.pipeline.pushed
        return [pushed(stage, self.step, self.emptied) for stage in stages]

    @override
    def settled(self) -> Version:
        return self.client.settled()

    @property
    @override
    def looking_up(self) -> Sequence[int]:
        return () if self.worker.tables is None else (self.worker.rank // self.topology.stages,)

    @override
    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        self.lowered[:] = progress.course.lowered
        self.step = step = progress.batches_of(self.worker.rank // self.topology.stages)
        self._met = _Met(step)
        self.emptied = progress.emptied
        self.compression.load(values)
        pipeline, stage = self.worker.pipeline, self.worker.part.index
        self.client.restart(pipeline.pushed(stage, step, self.emptied), values)
        if self.worker.tables is not None:
            self.worker.tables.restart(Version(step), values)
        self.runner.run(load_flight(self.worker, step, self.emptied, values))

    def join(self, step: int) -> None:
        """Take the place of a lost worker at this step, with fresh state.

        Its residuals are lost.
        """
        assert isinstance(self.client, ServerClient)
        self.step = step
        self._met = replace(self._met, step=step)
        self.client.join(step)
        if self.worker.tables is not None:
            self.worker.tables.restart(Version(step), {})

    def _meet_evaluating(self, number: int, stop: StopRequest) -> None:
        """Stop all together, before the group of batches of this number, if one of them must."""
        if number % SYNC_EVERY:
            return

        def decide(reports: Reports) -> Values:
            return {"severity": _highest(stop, reports)}

        report = {"severity": stop.severity}
        decision = self._decision(Kind.STOP_REQUEST, Kind.STOP_DECISION, number, report, decide)
        obey(decision["severity"])

    def _decision(
        self,
        request: Kind,
        answer: Kind,
        number: int,
        report: Values,
        decide: Callable[[Reports], Values],
    ) -> Values:
        """Let the leader decide from the reports of all others; the same in all workers."""
        if not self.leads:
            self.messenger.send(self.leader, request, number, report)
            return self.messenger.receive(self.leader, answer, number)
        others = [rank for rank in range(self.topology.num_workers) if rank != self.leader]
        decision = decide([self.messenger.receive(rank, request, number) for rank in others])
        for rank in others:
            self.messenger.send(rank, answer, number, decision)
        return decision

    def since_last_met(self, step: int, samples_per_step: int) -> Interval:
        """This worker's sums since the last meeting, except those over its rows."""
        before, self._met = self._met, _Met(step, *self.traffic())
        steps = step - before.step
        return Interval(
            compression=self.compression.counts(),
            sent_bytes=self._met.sent_bytes - before.sent_bytes,
            dense_equivalent_bytes=self._met.dense_bytes - before.dense_bytes,
            sent_rows=samples_per_step * steps if self.leads else 0,
        )


def _highest(stop: StopRequest, reports: Reports) -> int:
    return max([stop.severity, *(report["severity"] for report in reports)])
