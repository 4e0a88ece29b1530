"""Scores of a model on the test part."""

from __future__ import annotations

from collections.abc import Callable

import torch

from dlrm_hybrid.data.loader import sequential_batches
from dlrm_hybrid.data.shards import Shards
from dlrm_hybrid.model.dlrm import Dlrm
from dlrm_hybrid.model.step import predict
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, BinaryScores


def evaluate(
    model: Dlrm, shards: Shards, rows: range, batch_size: int, check: Callable[[], None]
) -> BinaryScores:
    """Predict consecutive rows in file order and score them.

    Args:
        model: learns nothing here.
        shards: prepared rows.
        rows: which of them.
        batch_size: rows predicted at once; the scores do not depend on it.
        check: called before each batch; whatever it raises ends the evaluation.
    """
    metrics = BinaryMetrics()
    for batch in sequential_batches(shards, rows, batch_size):
        check()
        logit_B = predict(model, torch.from_numpy(batch.dense_BI), torch.from_numpy(batch.ids_FB))
        metrics.add(logit_B.numpy(), batch.label_B)
    return metrics.scores()
