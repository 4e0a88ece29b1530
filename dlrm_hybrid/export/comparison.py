"""A written model held against the checkpoint that it was made from, on prepared or drawn rows.

Shapes: B rows of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass

import numpy as np

from dlrm_hybrid.bags import Int64s, jagged
from dlrm_hybrid.data.loader import Batch
from dlrm_hybrid.data.preprocessing import Preprocessing
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
        rows: that were scored.
        rows_apart: by more than another order of sums makes; a NaN is.
        before: scores of the checkpoint; None of rows without labels.
        after: scores of the written model.
    """

    logit_difference: float
    score_difference: float
    rows: int
    rows_apart: int
    before: BinaryScores | None
    after: BinaryScores | None

    def is_equal(self, *, masked: bool) -> bool:
        """Whether no row is apart.

        Args:
            masked: activations are masked; then one row of 1,000 may be, in which two elements tie
                for the last place up to the order of sums, and each model keeps another one.
        """
        return self.rows_apart <= (self.rows // MASKED_ROWS if masked else 0)

    @property
    def auc_difference(self) -> float | None:
        """After less before; None where all labels are the same."""
        if self.after is None or self.before is None:
            return None
        if self.after.auc is None or self.before.auc is None:
            return None
        return self.after.auc - self.before.auc


def drawn_batches(
    preprocessing: Preprocessing, rows: int, batch_size: int
) -> Generator[Batch, None, None]:
    """Rows of any categories and numbers, the same each time, as they may reach a model."""
    rng, columns = np.random.default_rng(0), preprocessing.schema.categorical
    for first in range(0, rows, batch_size):
        count = min(batch_size, rows - first)
        lengths_FB = np.ones((len(columns), count), np.int64)
        for table in preprocessing.schema.multi_hot:
            lengths_FB[table] = rng.integers(0, columns[table].max_length + 1, count)
        sizes = zip(preprocessing.table_rows, lengths_FB.sum(1).tolist(), strict=True)
        ids: list[Int64s] = [rng.integers(0, size, length) for size, length in sizes]
        dense_BI = rng.standard_normal((count, preprocessing.schema.num_dense), np.float32)
        bags = preprocessing.expanded(jagged(np.concatenate(ids), lengths_FB))
        yield Batch(dense_BI, bags, np.zeros(count, np.float32))


def compare(
    before: Scorer,
    after: Scorer,
    batches: Iterable[Batch],
    progress: Callable[[int], object],
    *,
    labelled: bool = True,
) -> Comparison:
    """Score rows with two models.

    Args:
        before: the checkpoint's.
        after: the written one.
        batches: of the rows, at least one.
        progress: called with the rows done.
        labelled: whether the labels of the rows are any.
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
    one, other = (counted.scores() if labelled else None for counted in metrics)
    return Comparison(
        logit_difference=float(largest[0]),
        score_difference=float(largest[1]),
        rows=rows,
        rows_apart=rows_apart,
        before=one,
        after=other,
    )
