"""A worker: what it trains with, and its part in steps, evaluations and checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.compression import Compression
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.peers import MasterClient
from dlrm_hybrid.parallel.effects import Program
from dlrm_hybrid.parallel.finite import check_weights, is_check_due
from dlrm_hybrid.parallel.messages import Messenger, piece_of, values_of
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.parallel.step import StepMetrics, drain, train_step
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.parallel.worker import Worker, flight, load_flight, predict_batch, stage_inputs
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train import statistics
from dlrm_hybrid.train.engine import Holder
from dlrm_hybrid.train.evaluation import EvaluatedRows
from dlrm_hybrid.train.progress import SYNC_EVERY, Progress
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.types import ScoredPart, Tick, Version
from dlrm_hybrid.wire.frame import Kind


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Learner:
    """A worker, the client of its weights, and its compressors.

    Attributes:
        worker: the worker's stage, boundaries and clients.
        client: client of its weights: the one below that of its steps, if there are two.
        compression: compressors of the worker.
    """

    worker: Worker
    client: ServerClient | MasterClient
    compression: Compression

    @property
    def trainer(self) -> int:
        """Number of the worker's trainer."""
        return self.compression.trainer

    @property
    def masters(self) -> MasterClient | None:
        """The client, if the worker has the masters of its weights itself."""
        return None if isinstance(self.client, ServerClient) else self.client

    def learn(self, step: int, batch: Batch, coming: Sequence[Batch] = ()) -> Program[StepMetrics]:
        """Make one training step; `coming` are the next ones, as far as its tables look ahead."""
        return train_step(self.worker, Tick(step), stage_inputs(self.worker, batch, coming))

    def check_weights(
        self,
        step: int,
        rows: int,
        schedule: LrSchedule,
        tensors: Callable[[], Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Check weights after a step, now and then, where no server has checked the pushes.

        Args:
            step: number of the step.
            rows: number of its rows.
            schedule: learning rate of the dense parameters.
            tensors: see `finite.check_weights`; None for those of this worker.
        """
        masters, worker = self.masters, self.worker
        if masters is not None and is_check_due(step, rows):
            rates = {
                "optimizer.lr": schedule.lr(step),
                "embedding.lr": worker.embedding_schedule.lr(step),
            }
            check_weights(step, worker.name, masters.weights, tensors or masters.tensors, rates)

    def pieces(self, step: int, emptied: int) -> Program[list[Piece]]:
        """Views of what a checkpoint must hold of this worker, between two steps.

        Args:
            step: number of steps done.
            emptied: the last step at which no batch was in flight.
        """
        worker, masters = self.worker, self.masters
        pieces = self.compression.pieces()
        pieces += statistics.pieces(self.trainer, worker.stage.model)
        if worker.tables is not None:
            pieces += yield from worker.tables.state_ahead()
        if masters is not None:
            yield from masters.pull()
            pieces += full_pieces({} if self.trainer else masters.tensors())
        return pieces + (yield from flight(worker, step, emptied))

    def restart(self, step: int, emptied: int, values: Mapping[str, Tensor]) -> Program[None]:
        """Resume after so many batches from `pieces` and the servers' weights; see `pieces`."""
        worker = self.worker
        self.compression.load(values)
        self.client.restart(worker.pipeline.pushed(worker.part.index, step, emptied), values)
        if worker.tables is not None:
            worker.tables.restart(Version(step), values)
        yield from load_flight(worker, step, emptied, values)


@final
@dataclass(slots=True, kw_only=True)
class WorkerRank(Holder):
    """One worker in a world of processes.

    Attributes:
        topology: ranks and roles of the world.
        messenger: to the other ranks.
        runner: runner of the worker's programs.
        learner: the worker, and all that it trains with.
        tables: pieces of tables that the worker holds.
        schedule: learning rate of the dense parameters, to report it.
        evaluator: the worker's stage with separate weights; its tables take batches of any size.
        rows: rows to evaluate, by part.
        leader: rank of the process that gives orders, or asks for shards of checkpoints.
        lowered: first steps of lower learning rates.
        traffic: traffic of training steps so far; see `RankMeter.steps_traffic`.
        step: number of steps done.
        emptied: the last step at which no batch was in flight.
    """

    topology: Topology
    messenger: Messenger
    runner: ProcessRunner
    learner: Learner
    tables: Sequence[Piece]
    schedule: LrSchedule
    evaluator: Worker
    rows: Mapping[ScoredPart, EvaluatedRows]
    traffic: Callable[[], tuple[int, int]]
    leader: int
    lowered: list[int]
    step: int = 0
    emptied: int = 0
    _sent: tuple[int, int] = (0, 0)

    @property
    def worker(self) -> Worker:
        """The worker's stage, boundaries and clients."""
        return self.learner.worker

    @property
    def leads(self) -> bool:
        """Whether it is the leader itself."""
        return self.messenger.rank == self.leader

    def lower(self, step: int) -> None:
        """Lower learning rates from this step on; servers know before they can apply it.

        Servers wait for all trainers, so it is enough if each stage of one trainer tells them.
        """
        self.lowered.append(step)
        if self.worker.rank < self.topology.stages:
            for server in self.topology.all_servers:
                self.messenger.send(server, Kind.LOWER, step, {})

    def drain(self) -> StepMetrics | None:
        """Finish the batches in flight; None if steps leave none there."""
        if not self.is_stale:
            return None
        metrics = self.runner.run(drain(self.worker, self.step))
        self.emptied = self.step
        return metrics

    def learn(self, batch: Batch, coming: Sequence[Batch] = ()) -> StepMetrics:
        """Make one training step with the other ranks of the world.

        Args:
            batch: its rows.
            coming: batches of the next steps, as far as its tables look ahead.
        """
        step = self.step
        metrics = self.runner.run(self.learner.learn(step, batch, coming))
        self.learner.check_weights(step, len(batch.label_B), self.schedule)
        self.step = step + 1
        return metrics

    def evaluate(self, part: ScoredPart, stop: StopRequest, trainers: Sequence[int]) -> None:
        """Take part in an evaluation by these trainers, in which another rank leads.

        Raises:
            PreemptedError, InterruptedRunError: all workers have stopped at the same batch.
        """

        def meet(number: int, done_rows: int) -> None:
            if number % SYNC_EVERY == 0:
                request = {"severity": stop.severity}
                self.messenger.send(self.leader, Kind.STOP_REQUEST, number, request)
                decision = self.messenger.receive(self.leader, Kind.STOP_DECISION, number)
                obey(decision["severity"])

        self.scores(part, trainers, meet)

    def scores(
        self, part: ScoredPart, trainers: Sequence[int], meet: Callable[[int, int], None]
    ) -> BinaryScores | None:
        """Score the master weights; returns the scores at the leader, None elsewhere.

        Each trainer predicts every T-th batch; the leader scores all.

        Args:
            part: the rows to score.
            trainers: trainers that take part; all must with sharded tables.
            meet: called by all workers before each group of batches, with its number and the rows
                done; an error that it raises in all of them ends the evaluation.
        """
        self.begin_evaluation(trainers)
        metrics, place = self.rows[part].metrics(), trainers.index(self.learner.trainer)
        for number, done_rows, group in self.rows[part].groups(len(trainers)):
            meet(number, done_rows)
            own_B = self.predict(
                number, group[place] if place < len(group) else group[0].part(slice(0))
            )
            if not self.leads:
                if own_B is not None:
                    tensors = {"logits": own_B}
                    self.messenger.send_tensors(self.leader, Kind.LOGITS, number, tensors)
                continue
            for trainer, batch in zip(trainers, group, strict=False):
                rank, logit_B = self.topology.worker(trainer, self.topology.stages - 1), own_B
                if rank != self.leader:
                    tensors = self.messenger.receive_tensors(rank, Kind.LOGITS, number)
                    logit_B = tensors["logits"]
                assert logit_B is not None
                metrics.add(logit_B.numpy(), *batch.outcomes)
        return metrics.scores() if self.leads else None

    def begin_evaluation(self, trainers: Sequence[int]) -> None:
        """Take the masters to score; no table may change until the last `predict`."""
        self.evaluator.stage.model.fill(self.masters(trainers))
        if self.evaluator.tables is not None:
            self.evaluator.tables.begin_evaluation()

    def predict(self, number: int, batch: Batch) -> Tensor | None:
        """Compute logits of this trainer's batch in the last stage, with the evaluated weights.

        Args:
            number: number of the batch, unique in an evaluation.
            batch: any number of rows.
        """
        if len(batch.label_B):
            inputs = stage_inputs(self.evaluator, batch)
            return self.runner.run(predict_batch(self.evaluator, number, inputs))
        if self.evaluator.tables is not None:
            # Sharded tables serve all trainers together, so one without rows looks up none.
            bags = self.evaluator.columns.by_table(tensor_bags(batch.bags))
            self.runner.run(self.evaluator.tables.predict(bags))
        return None

    def masters(self, trainers: Sequence[int]) -> Mapping[str, Tensor]:
        """The master weights and mean statistics of its stage, for evaluations by these trainers.

        All of their workers call it together.
        """
        stage = self.worker.part.index
        if (masters := self.learner.masters) is None:
            weights = self.messenger.fetch(self.topology.server_group, self.settled(), stage)
        else:
            self.runner.run(masters.pull())  # all pushes made so far
            weights = masters.tensors()
        ranks = [self.topology.worker(trainer, stage) for trainer in trainers]
        model = self.worker.stage.model
        return {**weights, **statistics.exchanged(self.messenger, ranks, model, self.step)}

    @override
    def pieces(self) -> list[Piece]:
        return [*self.runner.run(self.learner.pieces(self.step, self.emptied)), *self.tables]

    def server_pieces(self) -> Iterator[Piece]:
        """Yield copies of the weights and optimizer state that servers hold, in parts."""
        for server in self.topology.all_servers:
            number = 0
            while True:
                request = {"part": number, "step": self.step, "pushed": self.pushed()}
                frame = self.messenger.ask(
                    server, Kind.FETCH, self.settled(), request, by=Kind.WEIGHTS
                )
                if number == values_of(frame)["count"]:
                    break
                yield piece_of(frame)
                number += 1

    @property
    def is_stale(self) -> bool:
        """Whether steps leave batches in flight."""
        return self.worker.pipeline.most_in_flight > 0

    @override
    def pushed(self) -> Sequence[int] | None:
        if not self.is_stale:
            return None
        stages, pushed = range(self.topology.stages), self.worker.pipeline.pushed
        return [pushed(stage, self.step, self.emptied) for stage in stages]

    @override
    def settled(self) -> Version:
        return self.learner.client.settled()

    @property
    @override
    def looking_up(self) -> Sequence[int]:
        return () if self.worker.tables is None else (self.learner.trainer,)

    @override
    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        self.lowered[:] = progress.course.lowered
        self.step = progress.batches_of(self.learner.trainer)
        self.emptied = progress.emptied
        self.runner.run(self.learner.restart(self.step, self.emptied, values))

    def join(self, step: int) -> None:
        """Take the place of a lost worker at this step, with fresh state.

        Its residuals are lost.
        """
        client = self.learner.client
        assert isinstance(client, ServerClient)
        self.step = step
        client.join(step)
        if self.worker.tables is not None:
            self.worker.tables.restart(Version(step), {})

    def take_interval(self) -> Interval:
        """This worker's sums since the last call, except those over its rows."""
        before, self._sent = self._sent, self.traffic()
        sent_bytes, dense_bytes = (now - then for now, then in zip(self._sent, before, strict=True))
        return Interval(
            compression=self.learner.compression.counts(),
            sent_bytes=sent_bytes,
            dense_equivalent_bytes=dense_bytes,
        )
