"""The rows of an evaluation, and their scoring by a world of processes.

Each trainer predicts every T-th batch; the leader scores all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import final

from torch import Tensor

from dlrm_hybrid import bags
from dlrm_hybrid.arrays import Bools
from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.embeddings import tensor_bags
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.parallel.worker import Worker, predict_batch, stage_inputs
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, BinaryScores, LabelMetrics, metrics_of
from dlrm_hybrid.types import ScoredPart
from dlrm_hybrid.wire.frame import Kind


@dataclass(frozen=True, slots=True)
class EvaluatedRows:
    """Rows to evaluate, in file order.

    Attributes:
        shards: prepared rows.
        rows: numbers of the rows to evaluate.
        batch_size: number of rows predicted at once; scores do not depend on it.
        known: for each table, whether each id is known; unknown ids become 0. None: all are known.
    """

    shards: Shards
    rows: range
    batch_size: int
    known: Sequence[Bools] | None = None

    def batches(self) -> Iterator[Batch]:
        """Read all rows in batches; the last may be smaller."""
        batches = sequential_batches(self.shards, self.rows, self.batch_size)
        if self.known is None:
            return batches
        is_known = self.known
        return (replace(batch, bags=bags.known(batch.bags, is_known)) for batch in batches)

    def metrics(self) -> BinaryMetrics | LabelMetrics:
        """Accumulator of the scores of these rows."""
        return metrics_of(self.shards.schema.loss_weights)

    def groups(self, trainers: int) -> Iterator[tuple[int, int, list[Batch]]]:
        """Yield groups of one batch per trainer, at the end fewer: number, rows before, batches."""
        batches = self.batches()
        for number in count():
            group = list(islice(batches, trainers))
            if not group:
                return
            yield number, number * trainers * self.batch_size, group


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorldEvaluation:
    """One worker's part in evaluations of a world of processes.

    Attributes:
        topology: ranks and roles of the world.
        messenger: to the other ranks.
        runner: runner of the worker's programs.
        evaluator: the worker's stage with separate weights; its tables take batches of any size.
        rows: rows of each part.
    """

    topology: Topology
    messenger: Messenger
    runner: ProcessRunner
    evaluator: Worker
    rows: Mapping[ScoredPart, EvaluatedRows]

    def scores(
        self,
        part: ScoredPart,
        leader: int,
        masters: Mapping[str, Tensor],
        trainers: Sequence[int],
        meet: Callable[[int, int], None],
    ) -> BinaryScores | None:
        """Score the master weights; returns the scores at the leader, None elsewhere.

        Args:
            part: the rows to score.
            leader: rank of the leader.
            masters: weights and statistics of this worker's stage, by name.
            trainers: trainers that take part; all must with sharded tables.
            meet: called by all workers before each group of batches, with its number and the rows
                done; an error that it raises in all of them ends the evaluation.
        """
        self.begin(masters)
        metrics = self.rows[part].metrics()
        place = trainers.index(self.messenger.rank // self.topology.stages)
        for number, done_rows, group in self.rows[part].groups(len(trainers)):
            meet(number, done_rows)
            share = group[place] if place < len(group) else group[0].part(slice(0))
            logit_B = self.predict(number, share)
            if self.messenger.rank == leader:
                for trainer, batch in zip(trainers, group, strict=False):
                    rank = self.topology.worker(trainer, self.topology.stages - 1)
                    if rank != leader:
                        tensors = self.messenger.receive_tensors(rank, Kind.LOGITS, number)
                        metrics.add(tensors["logits"].numpy(), *batch.outcomes)
                    else:
                        assert logit_B is not None
                        metrics.add(logit_B.numpy(), *batch.outcomes)
            elif logit_B is not None:
                self.messenger.send_tensors(leader, Kind.LOGITS, number, {"logits": logit_B})
        return metrics.scores() if self.messenger.rank == leader else None

    def begin(self, masters: Mapping[str, Tensor]) -> None:
        """Take the weights to score; no table may change until the last `predict`."""
        self.evaluator.stage.model.fill(masters)
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
            self.runner.run(self.evaluator.tables.predict(tensor_bags(batch.bags)))
        return None


def gathered_scores(
    topology: Topology,
    rows: EvaluatedRows,
    trainers: Sequence[int],
    receive: Callable[[int, int], Tensor | None],
    meet: Callable[[int, int], None],
) -> BinaryScores | None:
    """Score logits of other ranks, at a leader that predicts nothing itself.

    Args:
        topology: ranks and roles of the world.
        rows: rows to score.
        trainers: trainers that take part.
        receive: receives a rank's logits for a group of batches; None if it was lost.
        meet: as for `WorldEvaluation.scores`.

    Returns:
        The scores; None if a trainer was lost meanwhile, after all frames are received.
    """
    metrics, is_whole = rows.metrics(), True
    for number, done_rows, group in rows.groups(len(trainers)):
        meet(number, done_rows)
        for trainer, batch in zip(trainers, group, strict=False):
            logit_B = receive(topology.worker(trainer, topology.stages - 1), number)
            if logit_B is None:
                is_whole = False
            elif is_whole:
                metrics.add(logit_B.numpy(), *batch.outcomes)
    return metrics.scores() if is_whole else None
