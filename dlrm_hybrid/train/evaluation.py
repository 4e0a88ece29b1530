"""The rows of an evaluation, and their scores where a server leads."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

from torch import Tensor

from dlrm_hybrid import bags
from dlrm_hybrid.arrays import Bools
from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, BinaryScores, LabelMetrics, metrics_of


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
        meet: as for `WorkerRank.scores`.

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
