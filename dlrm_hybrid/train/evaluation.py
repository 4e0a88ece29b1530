"""The rows of an evaluation, and how a world of processes scores them together.

Each trainer predicts every T-th batch, the leader scores all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import final

import torch
from torch import Tensor

from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.parallel.messages import Messenger
from dlrm_hybrid.parallel.runners import ProcessRunner
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.parallel.worker import Worker, predict_batch, stage_inputs
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, BinaryScores
from dlrm_hybrid.wire.frame import Kind


@dataclass(frozen=True, slots=True)
class TestPart:
    """Rows to evaluate, in file order.

    Attributes:
        shards: prepared rows.
        rows: which of them.
        batch_size: rows predicted at once; the scores do not depend on it.
    """

    shards: Shards
    rows: range
    batch_size: int

    def batches(self) -> Iterator[Batch]:
        """All rows; the last batch may be smaller."""
        return sequential_batches(self.shards, self.rows, self.batch_size)

    def groups(self, trainers: int) -> Iterator[tuple[int, int, list[Batch]]]:
        """A batch for each trainer, fewer at the end; with its number, and the rows before it."""
        batches = self.batches()
        for number in count():
            group = list(islice(batches, trainers))
            if not group:
                return
            yield number, number * trainers * self.batch_size, group


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorldEvaluation:
    """One worker's part.

    Attributes:
        topology: of the world.
        messenger: to the others.
        runner: of the worker's programs.
        evaluator: its stage, with weights of its own; its tables take batches of any size.
        test: the rows.
    """

    topology: Topology
    messenger: Messenger
    runner: ProcessRunner
    evaluator: Worker
    test: TestPart

    def scores(
        self, leader: int, masters: Mapping[str, Tensor], meet: Callable[[int, int], None]
    ) -> BinaryScores | None:
        """Scores of the master weights at the leader, None elsewhere.

        Args:
            leader: its rank.
            masters: the weights of this worker's stage by name.
            meet: called before each group of batches with its number and the rows done, by all
                workers alike; what it raises in all of them ends the evaluation.
        """
        for name, weight in self.evaluator.stage.model.dense_parameters().items():
            weight.detach().copy_(masters[name])
        metrics = BinaryMetrics()
        for number, done_rows, group in self.test.groups(self.topology.trainers):
            meet(number, done_rows)
            logit_B = self._predict(number, group)
            if self.messenger.rank == leader:
                _score(self.topology, self.messenger, number, group, logit_B, metrics)
            elif logit_B is not None:
                self.messenger.send_tensors(leader, Kind.LOGITS, number, {"logits": logit_B})
        return metrics.scores() if self.messenger.rank == leader else None

    def _predict(self, number: int, group: list[Batch]) -> Tensor | None:
        """Logits of this trainer's batch in the last stage."""
        trainer = self.messenger.rank // self.topology.stages
        if trainer < len(group):
            inputs = stage_inputs(self.evaluator, group[trainer])
            return self.runner.run(predict_batch(self.evaluator, number, inputs))
        if self.evaluator.tables is not None:
            # Sharded tables answer all trainers together: one without rows asks for none.
            nothing_FB = torch.from_numpy(group[0].ids_FB[:, :0])
            self.runner.run(self.evaluator.tables.predict(nothing_FB))
        return None


def gathered_scores(
    topology: Topology, messenger: Messenger, test: TestPart, meet: Callable[[int, int], None]
) -> BinaryScores:
    """What `WorldEvaluation.scores` gives the leader, at a leader that predicts nothing itself."""
    metrics = BinaryMetrics()
    for number, done_rows, group in test.groups(topology.trainers):
        meet(number, done_rows)
        _score(topology, messenger, number, group, None, metrics)
    return metrics.scores()


def _score(
    topology: Topology,
    messenger: Messenger,
    number: int,
    group: list[Batch],
    own_B: Tensor | None,
    metrics: BinaryMetrics,
) -> None:
    """Add a group of batches, whose logits come from the last stages of the trainers."""
    for trainer, batch in enumerate(group):
        rank = topology.worker(trainer, topology.stages - 1)
        logit_B = own_B
        if rank != messenger.rank:
            logit_B = messenger.receive_tensors(rank, Kind.LOGITS, number)["logits"]
        assert logit_B is not None
        metrics.add(logit_B.numpy(), batch.label_B)
