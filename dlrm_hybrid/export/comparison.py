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
MASKED_ROWS = 1000  # of so many one may be apart where activations are masked


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What two models make of the same rows.

    Attributes:
        logit_difference: the largest, of logits above 1 relative to them.
        score_difference: the largest of two probabilities.
        rows_apart: by more than another order of sums makes; a NaN is.
        before: scores of the checkpoint.
        after: scores of the written model.
    """

    logit_difference: float
    score_difference: float
    rows_apart: int
    before: BinaryScores
    after: BinaryScores

    def is_equal(self, *, masked: bool) -> bool:
        """Whether no row is apart.

        Args:
            masked: activations are masked; then one row of 1,000 may be, in which two elements tie
                for the last place up to the order of sums, and each model keeps another one.
        """
        return self.rows_apart <= (self.before.rows // MASKED_ROWS if masked else 0)

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
    rows = rows_apart = 0
    for batch in batches:
        logit_B, score_B = before(batch)
        other_B, other_score_B = after(batch)
        for one, found_B in zip(metrics, (logit_B, other_B), strict=True):
            one.add(found_B, batch.label_B)
        apart_B = np.abs(other_B - logit_B) / np.maximum(np.abs(logit_B), 1)
        score_apart_B = np.abs(other_score_B - score_B)
        worst = apart_B.max(), score_apart_B.max()
        near_B = (apart_B <= LOGIT_TOLERANCE) & (score_apart_B <= SCORE_TOLERANCE)
        rows_apart += int(np.count_nonzero(~near_B))
        largest = np.maximum(largest, worst)  # a NaN stays
        rows += len(logit_B)
        progress(rows)
    one, other = (counted.scores() for counted in metrics)
    return Comparison(
        logit_difference=float(largest[0]),
        score_difference=float(largest[1]),
        rows_apart=rows_apart,
        before=one,
        after=other,
    )
