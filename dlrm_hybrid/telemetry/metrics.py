"""Scores of click predictions, added up batch by batch.

The AUC comes from a histogram of the logits. Its bins are ranges of 2**shift adjacent float32
numbers; shift is the smallest that leaves at most `max_bins` bins in use. So the AUC is exact up to
that many distinct logits, however close they are, and it never depends on the order of the rows or
on their division among ranks. GAUC is exact: it keeps the rows that have a group.

Shapes: B rows of a batch, L labels if there are several, N rows counted at once, K bins in use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import log
from typing import Any, NamedTuple, final

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.arrays import Bools, Float32s, Float64s, Int64s, Words
from dlrm_hybrid.types import DataError, DivergedError

Counts = npt.NDArray[np.int64 | np.float64]
MAX_BINS = 1 << 20
# Rows buffered before they are counted, so that a step's batch costs little more than a copy.
# Fixed, so that the sums do not depend on the batch size.
PENDING_ROWS = 1 << 18


@dataclass(frozen=True, slots=True)
class BinaryScores:
    """Scores of predictions of a binary label; where rows have weights, all but `rows` count these.

    Of several labels `log_loss` is the weighted sum, and all others are those of the first label.

    Attributes:
        rows: number of rows.
        log_loss: mean of -ln p(label), nats.
        accuracy: share of rows whose label equals p > 0.5.
        auc: area under the ROC curve, ties count half; None if only one class was seen.
        normalized_entropy: log-loss over that of always predicting the base rate; None like auc.
        base_rate: share of rows with label 1.
        calibration: mean prediction over the base rate, 1 at best; None if no label is 1.
        gauc: mean of the AUC in each group of rows with both labels, by the groups' rows; None
            without such groups.
        labels: of several labels, the scores of each by its name; empty for one label.
    """

    rows: int
    log_loss: float
    accuracy: float
    auc: float | None
    normalized_entropy: float | None
    base_rate: float
    calibration: float | None
    gauc: float | None = None
    labels: dict[str, BinaryScores] = field(default_factory=dict[str, "BinaryScores"])

    @property
    def values(self) -> dict[str, Any]:
        """The scores by name; `gauc` and `labels` only if there are any."""
        scores = asdict(self)
        if self.gauc is None:
            del scores["gauc"]
        del scores["labels"]
        if self.labels:
            scores["labels"] = {name: label.values for name, label in self.labels.items()}
        return scores


class BinaryMetrics:
    """Accumulates the scores of rows, batch by batch."""

    def __init__(self, max_bins: int = MAX_BINS) -> None:
        self._max_bins = max_bins
        self._totals = _Totals(0, 0, 0, 0.0, 0.0, 0, _NO_BINS, _NO_BINS)
        self._logit_N = np.empty(PENDING_ROWS, np.float32)
        self._label_N = np.empty(PENDING_ROWS, np.bool_)
        self._weight_N: Float64s | None = None
        self._pending = 0
        self._grouped: list[_Grouped] = []

    def add(
        self,
        logit_B: Float32s,
        label_B: Float32s,
        weight_B: Float32s | None = None,
        group_B: Int64s | None = None,
    ) -> None:
        """Count the rows of a batch, each as its weight or 1; the arrays are copied.

        Args:
            label_B: 0 or 1.
            weight_B: weights; None for 1 each.
            group_B: groups, whose rows are all kept until the end; 0 for rows without one.

        Raises:
            DivergedError: a logit is not finite; raised late, at the latest by `scores`.
        """
        if weight_B is not None and self._weight_N is None:
            self._weight_N = np.ones(PENDING_ROWS)
        if group_B is not None:
            count_B = np.ones(len(label_B), np.int64)
            weights_B = count_B if weight_B is None else weight_B.astype(np.float64)
            mask_B = group_B != 0
            grouped = group_B[mask_B], logit_B[mask_B], label_B[mask_B] > 0.5, weights_B[mask_B]
            self._grouped.append(_Grouped(*grouped))
        start = 0
        while start < len(logit_B):
            end = min(self._pending + len(logit_B) - start, PENDING_ROWS)
            stop = start + end - self._pending
            self._logit_N[self._pending : end] = logit_B[start:stop]
            self._label_N[self._pending : end] = label_B[start:stop]
            if self._weight_N is not None:
                weight = 1 if weight_B is None else weight_B[start:stop]
                self._weight_N[self._pending : end] = weight
            start, self._pending = stop, end
            if end == PENDING_ROWS:
                self._totals, self._pending = self._all(), 0

    def scores(self) -> BinaryScores:
        """Scores of the rows so far; more may follow.

        Raises:
            ValueError: there are no rows.
            DataError: all weights are 0.
            DivergedError: a logit is not finite.
        """
        totals = self._all()
        if totals.rows == 0:
            raise ValueError("no rows to score")
        weight = totals.clicks + totals.skips
        if weight == 0:
            raise DataError(f"{totals.rows:,} rows to score, none with a weight above 0")
        base_rate = totals.clicks / weight
        log_loss = totals.loss / weight
        one_class = totals.clicks in (0, weight)
        return BinaryScores(
            rows=totals.rows,
            log_loss=log_loss,
            accuracy=totals.correct / weight,
            auc=None if one_class else _auc(totals.clicked, totals.skipped),
            normalized_entropy=None if one_class else log_loss / _entropy(base_rate),
            base_rate=base_rate,
            calibration=totals.predicted / totals.clicks if totals.clicks else None,
            gauc=_gauc(self._grouped) if self._grouped else None,
        )

    def _all(self) -> _Totals:
        rows = slice(self._pending)
        weight_N = None if self._weight_N is None else self._weight_N[rows]
        pending = _count(self._logit_N[rows], self._label_N[rows], weight_N)
        return self._totals.plus(pending, self._max_bins)


@final
class LabelMetrics:
    """Accumulates the scores of rows with several labels, as `BinaryMetrics` of one.

    Args:
        loss_weights: the factor of each label's loss in the sum, by its name.
    """

    def __init__(self, loss_weights: Mapping[str, float]) -> None:
        self._loss_weights = loss_weights
        self._metrics = {name: BinaryMetrics() for name in loss_weights}

    def add(
        self,
        logit_BL: Float32s,
        label_BL: Float32s,
        weight_B: Float32s | None = None,
        group_B: Int64s | None = None,
    ) -> None:
        """Count the rows of a batch; see `BinaryMetrics.add`."""
        for place, metrics in enumerate(self._metrics.values()):
            metrics.add(logit_BL[:, place], label_BL[:, place], weight_B, group_B)

    def scores(self) -> BinaryScores:
        """Scores of the rows so far; raises as `BinaryMetrics.scores`."""
        scores = {name: metrics.scores() for name, metrics in self._metrics.items()}
        loss = sum(weight * scores[name].log_loss for name, weight in self._loss_weights.items())
        return replace(next(iter(scores.values())), log_loss=loss, labels=scores)


def metrics_of(loss_weights: Mapping[str, float]) -> BinaryMetrics | LabelMetrics:
    """Metrics of labels with these loss weights by name, or of a single label without any."""
    return LabelMetrics(loss_weights) if loss_weights else BinaryMetrics()


@dataclass(frozen=True, slots=True)
class _Bins:
    """A histogram: distinct keys in increasing order, and the rows of each or their weight."""

    key_K: Words
    rows_K: Counts
    shift: int

    def coarser(self, shift: int) -> _Bins:
        """The same rows in bins of 2**shift numbers."""
        return _sum_up(self.key_K >> np.uint32(shift - self.shift), self.rows_K, shift)

    def plus(self, other: _Bins) -> _Bins:
        """The rows of both histograms, which have the same shift."""
        key = np.concatenate([self.key_K, other.key_K])
        order = np.argsort(key, kind="stable")  # finds the two sorted runs and merges them
        return _sum_up(key[order], np.concatenate([self.rows_K, other.rows_K])[order], self.shift)


_NO_BINS = _Bins(np.empty(0, np.uint32), np.empty(0, np.int64), 0)


@dataclass(frozen=True, slots=True)
class _Totals:
    """Sufficient statistics of rows for their scores: all but `rows` are sums of weights."""

    rows: int
    clicks: float
    skips: float
    loss: float
    predicted: float
    correct: float
    clicked: _Bins
    skipped: _Bins

    def plus(self, other: _Totals, max_bins: int) -> _Totals:
        shift = max(self.clicked.shift, other.clicked.shift)
        clicked = self.clicked.coarser(shift).plus(other.clicked.coarser(shift))
        skipped = self.skipped.coarser(shift).plus(other.skipped.coarser(shift))
        while len(clicked.key_K) + len(skipped.key_K) > max_bins and shift < 32:
            shift += 1
            clicked, skipped = clicked.coarser(shift), skipped.coarser(shift)
        sums = ("rows", "clicks", "skips", "loss", "predicted", "correct")
        added = {name: getattr(self, name) + getattr(other, name) for name in sums}
        return _Totals(**added, clicked=clicked, skipped=skipped)


def _count(
    logit_N: Float32s,
    label_N: Bools,
    weight_N: Float64s | None,
) -> _Totals:
    def total(x_N: npt.NDArray[Any]) -> Any:
        return (x_N if weight_N is None else x_N * weight_N).sum().item()

    finite_N = np.isfinite(logit_N)
    if not finite_N.all():
        raise DivergedError(f"a prediction is not finite: logit {logit_N[~finite_N][0]}")
    wide_N = logit_N.astype(np.float64)
    # -ln p(label) = ln(1 + exp(x)) - label * x, without overflow
    small_N = np.exp(-np.abs(wide_N))
    loss_N = np.log1p(small_N) + np.maximum(wide_N, 0) - label_N * wide_N
    key_N = _keys(logit_N)
    return _Totals(
        rows=len(logit_N),
        clicks=total(label_N),
        skips=total(~label_N),
        loss=total(loss_N),
        predicted=total(np.where(wide_N < 0, small_N, 1) / (1 + small_N)),
        correct=total((logit_N > 0) == label_N),
        clicked=_sort(key_N[label_N], None if weight_N is None else weight_N[label_N]),
        skipped=_sort(key_N[~label_N], None if weight_N is None else weight_N[~label_N]),
    )


def _keys(logit_N: Float32s) -> Words:
    """Map floats to integers in the same order: adjacent floats become adjacent integers."""
    pattern_N = (logit_N + np.float32(0)).view(np.int32)  # -0 + 0 = 0
    return pattern_N.view(np.uint32) ^ ((pattern_N >> 31).view(np.uint32) | np.uint32(1 << 31))


def _sort(key_N: Words, weight_N: Float64s | None) -> _Bins:
    if weight_N is None:
        return _sum_up(np.sort(key_N), np.ones(len(key_N), np.int64), 0)
    order_N = np.argsort(key_N, kind="stable")
    return _sum_up(key_N[order_N], weight_N[order_N], 0)


def _sum_up(key_N: Words, rows_N: Counts, shift: int) -> _Bins:
    """Merge equal keys, which are sorted, and add up their rows."""
    if len(key_N) == 0:
        return _Bins(key_N, rows_N, shift)
    first_K = np.flatnonzero(np.concatenate([[True], key_N[1:] != key_N[:-1]]))
    return _Bins(key_N[first_K], np.add.reduceat(rows_N, first_K), shift)


def _auc(clicked: _Bins, skipped: _Bins) -> float:
    """Share of (clicked, skipped) pairs in the right order; exact in integers up to 4e9 rows.

    A pair of rows with weights counts as their product.
    """
    before = np.concatenate([[0], np.cumsum(skipped.rows_K)])
    below_K = before[np.searchsorted(skipped.key_K, clicked.key_K, side="left")]
    up_to_K = before[np.searchsorted(skipped.key_K, clicked.key_K, side="right")]
    doubled = (clicked.rows_K * (below_K + up_to_K)).sum().item()
    return doubled / (2 * clicked.rows_K.sum().item() * before[-1].item())


class _Grouped(NamedTuple):
    """Rows with their groups."""

    group_N: Int64s
    logit_N: Float32s
    label_N: Bools
    weight_N: Counts


def _gauc(rows: Sequence[_Grouped]) -> float | None:
    """Mean of the AUC in each group with both labels, weighted by the groups' rows.

    Source: Zhou et al., Deep Interest Network for Click-Through Rate Prediction, KDD 2018.

    Shapes: N rows; K distinct logits of groups, ascending in each; G groups.
    """
    group_N, logit_N, label_N, weight_N = map(np.concatenate, zip(*rows, strict=True))
    order_N = np.lexsort((logit_N, group_N))
    group_N, logit_N, label_N, weight_N = (
        column[order_N] for column in (group_N, logit_N, label_N, weight_N)
    )
    if not len(group_N):
        return None
    is_group_N = np.append(True, group_N[1:] != group_N[:-1])
    first_K = np.flatnonzero(is_group_N | np.append(True, logit_N[1:] != logit_N[:-1]))
    first_G = np.flatnonzero(is_group_N[first_K])
    clicks_K, skips_K = (
        np.add.reduceat(weight_N * is_one_N, first_K) for is_one_N in (label_N, ~label_N)
    )
    clicks_G, skips_G = (np.add.reduceat(counts_K, first_G) for counts_K in (clicks_K, skips_K))
    ends_K, before_G = np.cumsum(skips_K), np.append(0, np.cumsum(skips_G)[:-1])
    below_K = ends_K - skips_K - np.repeat(before_G, np.diff(first_G, append=len(first_K)))
    doubled_G = np.add.reduceat(clicks_K * (2 * below_K + skips_K), first_G)
    both_G = (clicks_G > 0) & (skips_G > 0)
    if not both_G.any():
        return None
    auc_G = doubled_G[both_G] / (2.0 * clicks_G[both_G] * skips_G[both_G])
    return float(np.average(auc_G, weights=(clicks_G + skips_G)[both_G]))


def _entropy(rate: float) -> float:
    return -(rate * log(rate) + (1 - rate) * log(1 - rate))
