"""The engine of a run in one process: trainers, stages and servers are objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.comm.channel import Channel
from dlrm_hybrid.comm.metered import MeteredChannel
from dlrm_hybrid.data.loader import Batch, LoaderState, ReadAhead
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.dense.peers import MasterClient
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import Program, Result
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.step import StepMetrics, drain
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.parallel.worker import Worker, predict_batch, stage_inputs
from dlrm_hybrid.telemetry.compression import Counts, merged
from dlrm_hybrid.telemetry.histogram import ByTrainer, IdSample, merged_by_trainer
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.telemetry.traffic import Counters, Traffic, Versions
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.asynchronous.pace import Pace
from dlrm_hybrid.train.engine import Engine, Holder, Show
from dlrm_hybrid.train.evaluation import EvaluatedRows
from dlrm_hybrid.train.progress import Decision, Plan, Progress
from dlrm_hybrid.train.signals import StopRequest
from dlrm_hybrid.train.worker_rank import Learner
from dlrm_hybrid.types import Group, ScoredPart, Version

# Groups in the order in which a manifest lists them.
SAVED = (
    *(Group.DENSE, Group.VERSIONS, Group.COMPRESSOR, Group.LEVELS, Group.LOOKUPS),
    *(Group.FLIGHT, Group.STATISTICS, Group.EMBEDDINGS),
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks of a world in one process.

    Attributes:
        learners: workers of all trainers, by rank.
        servers: parameter servers with their channels.
        channels: one per rank.
        tables: all embedding tables, with their optimizers' state.
        table_servers: table servers with their channels.
    """

    learners: Sequence[Learner]
    servers: Sequence[tuple[Channel, ParameterServer]]
    channels: Sequence[MeteredChannel]
    tables: Sequence[Piece]
    table_servers: Sequence[tuple[Channel, TableServer]] = ()

    @property
    def workers(self) -> list[Worker]:
        """The workers, by rank."""
        return [learner.worker for learner in self.learners]


@final
@dataclass(slots=True, kw_only=True)
class InProcessEngine(Engine, Holder):
    """Runs the steps of all workers, interleaved in one process.

    Attributes:
        ranks: workers and servers.
        messenger: to other processes, of which there are none.
        runner: runner of the workers' programs.
        reads: per trainer, reads a training batch and those coming; none if a program has them.
        schedule: learning rate of the dense parameters, to report it.
        evaluators: workers of one trainer with separate stage models, for master weights.
        rows: rows to evaluate, by part.
        pace: pace of trainers that do not wait for each other; None in lockstep.
        id_sample: counts the ids of training batches.
        step: number of steps done.
        emptied: the last step at which no batch was in flight.
    """

    ranks: Ranks
    messenger: Messenger
    runner: InProcessRunner
    reads: Sequence[ReadAhead]
    schedule: LrSchedule
    evaluators: Sequence[Worker]
    rows: Mapping[ScoredPart, EvaluatedRows]
    pace: Pace | None
    id_sample: IdSample
    lowered: list[int]
    step: int = 0
    emptied: int = 0

    @property
    @override
    def holder(self) -> Holder:
        return self

    @property
    def uncounted(self) -> frozenset[Traffic]:
        """Traffic that processes would exchange, but that is not counted here."""
        alone = len(self.ranks.learners) == len(self.evaluators)
        return frozenset() if alone or self.ranks.table_servers else frozenset({Traffic.EMBEDDING})

    @property
    def versions(self) -> Callable[[], Versions] | None:
        """Counters of the servers' published versions so far; None without servers."""
        return self._versions if self.ranks.servers else None

    def staleness(self) -> ByTrainer:
        """Staleness of all pushes to the servers so far; see `ParameterServer.staleness`."""
        return merged_by_trainer(server.staleness() for _, server in self.ranks.servers)

    @property
    def count(self) -> Callable[[Counters], None] | None:
        """Sets the counters of all traffic from now on; None if there is none."""
        return self._count if len(self.ranks.channels) > 1 else None

    def _count(self, counters: Counters) -> None:
        for channel in self.ranks.channels:
            channel.counters = counters

    @override
    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        if self.pace is not None:
            return self.pace.make_step(step, at)
        reads = [read(at) for read in self.reads]
        metrics = self.learn([read.batch for read in reads], [read.coming for read in reads])
        return metrics, reads[0].after

    def learn(
        self, batches: Sequence[Batch], coming: Sequence[Sequence[Batch]] | None = None
    ) -> StepMetrics:
        """Make one step.

        Args:
            batches: one of each trainer.
            coming: batches of the trainers' next steps, as far as their tables look ahead.
        """
        step, inputs = self.step, [*zip(batches, coming or [()] * len(batches), strict=True)]
        outcomes = self._run(lambda x: x.learn(step, *inputs[x.trainer]))
        for learner in self.ranks.learners:
            learner.check_weights(step, len(batches[0].label_B), self.schedule, self._named)
        self.step = step + 1
        return reduce(StepMetrics.plus, outcomes)

    def _run(self, program: Callable[[Learner], Program[Result]]) -> list[Result]:
        """Run a program of each worker, interleaved; returns the results by rank."""
        outcomes = self.runner.run({x.worker.rank: program(x) for x in self.ranks.learners})
        return [outcomes[rank] for rank in sorted(outcomes)]

    @override
    def lower(self, step: int) -> None:
        """Lower the learning rates of all ranks from this step on."""
        self.lowered.append(step)

    @override
    def drain(self) -> StepMetrics | None:
        if not self.ranks.learners[0].worker.pipeline.most_in_flight:
            return None
        outcomes = self._run(lambda x: drain(x.worker, self.step))
        self.emptied = self.step
        return reduce(StepMetrics.plus, outcomes)

    @override
    def meet(
        self, progress: Progress, plan: Plan, stop: StopRequest, is_late: bool
    ) -> tuple[Progress, Decision]:
        """Add compression counters when they are due; see `Engine.meet`."""
        severity = stop.severity
        if severity or is_late or plan.anything_due(progress.step):
            progress = progress.plus(Interval(compression=self.compression()))
        if self.pace is not None:
            progress = replace(progress, batches=self.pace.batches)
            # Not by the clock: results depend on where trainers rest.
            if not self.pace.rests(progress.step, soon=severity > 0):
                return progress, Decision()
        return progress, plan.decision(progress, severity, is_late)

    @override
    def evaluate(self, part: ScoredPart, stop: StopRequest, show: Show) -> BinaryScores:
        self.take_masters()
        rows = self.rows[part]
        metrics = rows.metrics()
        for number, batch in enumerate(rows.batches()):
            stop.check()
            show(number * rows.batch_size, len(rows.rows))
            metrics.add(self.predict(number, batch).numpy(), *batch.outcomes)
        return metrics.scores()

    def take_masters(self) -> None:
        """Copy the present weights and statistics into the evaluators."""
        masters = self._dense()
        for stage, worker in enumerate(self.evaluators):
            learners = self.ranks.learners[stage :: len(self.evaluators)]
            of_trainers = [learner.worker.stage.model.statistics() for learner in learners]
            worker.stage.model.fill({**masters, **statistics.mean(of_trainers)})

    def predict(self, number: int, batch: Batch) -> Tensor:
        """Compute logits of a batch, as `predict_batch`, with the masters last taken.

        Args:
            number: number of the batch, unique in an evaluation.
            batch: any number of rows.
        """
        programs: dict[int, Program[Tensor | None]] = {
            worker.rank: predict_batch(worker, number, stage_inputs(worker, batch))
            for worker in self.evaluators
        }
        logit_B = self.runner.run(programs)[self.evaluators[-1].rank]
        assert logit_B is not None
        return logit_B

    @override
    def pieces(self) -> list[Piece]:
        of_workers = self._run(lambda x: x.pieces(self.step, self.emptied))
        parts = [*(server.pieces() for _, server in self.ranks.servers), *of_workers]
        pieces = [piece for part in (*parts, self.ranks.tables) for piece in part]
        return sorted(pieces, key=lambda piece: SAVED.index(piece.group))

    @override
    def settled(self) -> Version:
        return self.ranks.learners[0].client.settled()

    def compression(self) -> Counts:
        """Compression counters since the last call."""
        return merged(learner.compression.counts() for learner in self.ranks.learners)

    @override
    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        self.lowered[:] = progress.course.lowered
        self.step, self.emptied = progress.step, progress.emptied
        pushes = [
            evaluator.pipeline.pushed(stage, progress.step, self.emptied)
            for stage, evaluator in enumerate(self.evaluators)
        ]
        if self.pace is not None:
            self.pace.restart(progress)
            pushes = [sum(self.pace.batches)] * len(pushes)
        for channel, server in self.ranks.servers:
            for outgoing in server.restart(pushes, values):
                channel.send(*outgoing)
        for _, server in self.ranks.table_servers:
            server.restart(server.version_at(progress.step), values)
        self._run(lambda x: x.restart(progress.batches_of(x.trainer), self.emptied, values))

    @property
    @override
    def looking_up(self) -> Sequence[int]:
        return range(len(self.ranks.learners) // len(self.evaluators))

    def _named(self) -> dict[str, Tensor]:
        """The tensors to search for values that are not finite; of served tables, one server's."""
        return {**self._dense(), **{piece.name: piece.view for piece in self.ranks.tables}}

    def _versions(self) -> Versions:
        published = (server.versions() for _, server in self.ranks.servers)
        return reduce(Versions.plus, published, Versions())

    def _dense(self) -> dict[str, Tensor]:
        """The masters of all dense weights, with their optimizers' state."""
        owners = (*(server for _, server in self.ranks.servers), *self._masters())
        return {name: tensor for owner in owners for name, tensor in owner.tensors().items()}

    def _masters(self) -> list[MasterClient]:
        """The first trainer's clients with masters of their own, after all pushes made so far."""
        clients = {x.worker.rank: x.masters for x in self.ranks.learners if x.masters is not None}
        self.runner.run({rank: client.pull() for rank, client in clients.items()})
        return [client for rank, client in clients.items() if rank < len(self.evaluators)]
