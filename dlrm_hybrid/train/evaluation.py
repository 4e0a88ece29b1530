"""Scores of a model on the test part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from dlrm_hybrid.data.loader import Batch, sequential_batches
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.dlrm import Dlrm
from dlrm_hybrid.model.step import predict
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, BinaryScores


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


def evaluate(model: Dlrm, test: TestPart, check: Callable[[int], None]) -> BinaryScores:
    """Predict the test part and score it.

    Args:
        model: learns nothing here.
        test: the rows.
        check: called before each batch with the rows done; what it raises ends the evaluation.
    """
    metrics = BinaryMetrics()
    for number, batch in enumerate(test.batches()):
        check(number * test.batch_size)
        logit_B = predict(model, torch.from_numpy(batch.dense_BI), torch.from_numpy(batch.ids_FB))
        metrics.add(logit_B.numpy(), batch.label_B)
    return metrics.scores()
