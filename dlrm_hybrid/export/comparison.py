"""A written model held against the checkpoint that it was made from, on prepared rows.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.export.formats import Scorer
from dlrm_hybrid.telemetry.metrics import BinaryMetrics, BinaryScores

SCORE_TOLERANCE = 1e-5  # of probabilities
# Of logits below 1, of others relative. Sums of hundreds of float32 numbers, in another order.
LOGIT_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two models make of the same rows.

    Attributes:
        logit_difference: the largest, of logits above 1 relative to them.
        score_difference: the largest of two probabilities.
        before: scores of the checkpoint.
        after: scores of the written model.
    """

    logit_difference: float
    score_difference: float
    before: BinaryScores
    after: BinaryScores

    @property
    def is_equal(self) -> bool:
        """Whether they differ by no more than another order of sums may make; NaN is no equal."""
        return self.logit_difference <= LOGIT_TOLERANCE and self.score_difference <= SCORE_TOLERANCE

    @property
    def auc_difference(self) -> float | None:
        """After less before; None where all labels are the same."""
        if self.after.auc is None or self.before.auc is None:
            return None
        return self.after.auc - self.before.auc


def compare(
    before: Scorer, after: Scorer, batches: Iterable[Batch], progress: Callable[[int], object]
) -> Comparison:
    """Score rows with two models.

    Args:
        before: the checkpoint's.
        after: the written one.
        batches: of the rows, at least one.
        progress: called with the rows done.
    """
    metrics, largest = (BinaryMetrics(), BinaryMetrics()), np.zeros(2)
    rows = 0
    for batch in batches:
        logit_B, score_B = before(batch)
        other_B, other_score_B = after(batch)
        for one, found_B in zip(metrics, (logit_B, other_B), strict=True):
            one.add(found_B, batch.label_B)
        apart_B = np.abs(other_B - logit_B) / np.maximum(np.abs(logit_B), 1)
        worst = apart_B.max(), np.abs(other_score_B - score_B).max()
        largest = np.maximum(largest, worst)  # a NaN stays
        rows += len(logit_B)
        progress(rows)
    one, other = (counted.scores() for counted in metrics)
    return Comparison(
        logit_difference=float(largest[0]),
        score_difference=float(largest[1]),
        before=one,
        after=other,
    )
