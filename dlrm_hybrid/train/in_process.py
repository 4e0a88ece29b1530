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
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.peers import MasterClient
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.finite import check_weights, is_check_due
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import InProcessRunner
from dlrm_hybrid.parallel.step import StepMetrics, drain, train_step
from dlrm_hybrid.parallel.tables.base import Tables
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.parallel.worker import (
    Worker,
    flight,
    load_flight,
    predict_batch,
    stage_inputs,
)
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
from dlrm_hybrid.types import ScoredPart, Tick, Version


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """All ranks of a world in one process.

    Attributes:
        workers: workers of all trainers, by rank.
        clients: one per worker, in the same order.
        compressions: one per worker, in the same order.
        servers: parameter servers with their channels.
        channels: one per rank.
        tables: all embedding tables, with their optimizers' state.
        table_servers: table servers with their channels.
    """

    workers: Sequence[Worker]
    clients: Sequence[ServerClient | MasterClient]
    compressions: Sequence[Compression]
    servers: Sequence[tuple[Channel, ParameterServer]]
    channels: Sequence[MeteredChannel]
    tables: Sequence[Piece]
    table_servers: Sequence[tuple[Channel, TableServer]] = ()


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
        alone = len(self.ranks.workers) == len(self.evaluators)
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
        step, stages = self.step, len(self.evaluators)
        coming = coming or [()] * len(batches)
        inputs = list(zip(batches, coming, strict=True))
        programs: dict[int, Program[StepMetrics]] = {
            worker.rank: train_step(
                worker, Tick(step), stage_inputs(worker, *inputs[rank // stages])
            )
            for rank, worker in enumerate(self.ranks.workers)
        }
        outcomes = self.runner.run(programs)
        if is_check_due(step, len(batches[0].label_B)):
            self._check_weights(step)
        self.step = step + 1
        return _summed(outcomes)

    @override
    def lower(self, step: int) -> None:
        """Lower the learning rates of all ranks from this step on."""
        self.lowered.append(step)

    @override
    def drain(self) -> StepMetrics | None:
        if not self.ranks.workers[0].pipeline.most_in_flight:
            return None
        programs = {worker.rank: drain(worker, self.step) for worker in self.ranks.workers}
        outcomes = self.runner.run(programs)
        self.emptied = self.step
        return _summed(outcomes)

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
            learners = self.ranks.workers[stage :: len(self.evaluators)]
            of_trainers = [learner.stage.model.statistics() for learner in learners]
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
        ahead = self.runner.run(
            {rank: tables.state_ahead() for rank, tables in self._tables().items()}
        )
        flights = self.runner.run(
            {worker.rank: flight(worker, self.step, self.emptied) for worker in self.ranks.workers}
        )
        parts = [
            *(server.pieces() for _, server in self.ranks.servers),
            *(full_pieces(client.tensors()) for client in self._masters()),
            *(compression.pieces() for compression in self.ranks.compressions),
            *ahead.values(),
            *flights.values(),
            *(
                statistics.pieces(worker.rank // len(self.evaluators), worker.stage.model)
                for worker in self.ranks.workers
            ),
            self.ranks.tables,
        ]
        return [piece for part in parts for piece in part]

    @override
    def settled(self) -> Version:
        return self.ranks.clients[0].settled()

    def compression(self) -> Counts:
        """Compression counters since the last call."""
        return merged(compression.counts() for compression in self.ranks.compressions)

    @override
    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        self.lowered[:] = progress.course.lowered
        self.step, self.emptied = progress.step, progress.emptied
        stages = len(self.evaluators)
        pushes = [self._pushed(stage, progress.step) for stage in range(stages)]
        if self.pace is not None:
            self.pace.restart(progress)
            pushes = [sum(self.pace.batches)] * stages
        for compression in self.ranks.compressions:
            compression.load(values)
        for channel, server in self.ranks.servers:
            for outgoing in server.restart(pushes, values):
                channel.send(*outgoing)
        for _, server in self.ranks.table_servers:
            server.restart(server.version_at(progress.step), values)
        for rank, client in enumerate(self.ranks.clients):
            batches = progress.batches_of(rank // stages)
            client.restart(self._pushed(rank % stages, batches), values)
        for rank, tables in self._tables().items():
            tables.restart(Version(progress.batches_of(rank // stages)), values)
        self.runner.run(
            {
                worker.rank: load_flight(worker, self.step, self.emptied, values)
                for worker in self.ranks.workers
            }
        )

    def _pushed(self, stage: int, step: int) -> int:
        """Number of pushes by a worker of a stage after so many steps."""
        return self.ranks.workers[stage].pipeline.pushed(stage, step, self.emptied)

    @property
    @override
    def looking_up(self) -> Sequence[int]:
        return range(len(self.ranks.workers) // len(self.evaluators))

    def _tables(self) -> dict[int, Tables]:
        workers = self.ranks.workers
        return {worker.rank: worker.tables for worker in workers if worker.tables is not None}

    def _check_weights(self, step: int) -> None:
        """Check weights where no server has checked the pushes."""
        rates = {
            "optimizer.lr": self.schedule.lr(step),
            "embedding.lr": self.ranks.workers[0].embedding_schedule.lr(step),
        }
        for worker, client in zip(self.ranks.workers, self.ranks.clients, strict=True):
            if not isinstance(client, ServerClient):
                check_weights(step, worker.name, client.weights, self._named, rates)

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
        clients = {
            rank: client
            for rank, client in enumerate(self.ranks.clients)
            if not isinstance(client, ServerClient)
        }
        self.runner.run({rank: client.pull() for rank, client in clients.items()})
        return [client for rank, client in clients.items() if rank < len(self.evaluators)]


def _summed(outcomes: Mapping[int, StepMetrics]) -> StepMetrics:
    """Sum the metrics of all workers, in the order of their ranks."""
    return reduce(StepMetrics.plus, (outcomes[rank] for rank in sorted(outcomes)))
