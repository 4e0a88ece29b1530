"""Fits the synthetic-data profile: staircases of the columns, and scale of the planted teacher.

A sample shows only part of a column's categories. Ranks seen at least `HEAD_COUNT` times keep their
measured share. All other ranks up to the published number of categories follow
A * (t + B) ** -s, t = 1, 2, … after the head (Zipf and Mandelbrot), where A and B make the curve
continue the head and carry the remaining share, and s makes the expected number of distinct values
in a sample of this size equal to the one seen.

Shapes: R ranks, values or rows, S steps, T pieces of the tail, P pieces of head and tail, L logits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data import synthetic
from dlrm_hybrid.data.profile import LOGISTIC_STEPS_PER_UNIT, WEIGHT_ONE, Profile, Teacher

HEAD_COUNT = 8
SINGLE_STEPS = 48
STEP_RATIO = 1.07
INTEGER_STEPS = 100
TAIL_ROWS = 10  # an integer column's range ends this many rows before its extremes
UNIT = 1 << 20  # of the fixed-point logit
CALIBRATION_ROWS = 400_000
CALIBRATION_SEED = 0

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Steps:
    """Starts, stop and integer weights (together 2**32) of a staircase."""

    starts: tuple[int, ...]
    stop: int
    weights: tuple[int, ...]


ONE_VALUE = Steps((0,), 1, (WEIGHT_ONE,))  # of a column that is always empty


def whole_weights(shares: Floats) -> tuple[int, ...]:
    """Integers in proportion to `shares`, together exactly 2**32, none below 1."""
    edges = np.rint(np.cumsum(shares) / shares.sum() * WEIGHT_ONE).astype(np.int64)
    weights = np.maximum(np.diff(edges, prepend=0), 1)
    weights[np.argmax(weights)] += WEIGHT_ONE - int(weights.sum())
    return tuple(weights.tolist())


def integer_steps(value_R: Integers, count_R: Integers) -> Steps:
    """Steps between quantiles; a frequent value is a step of its own, the rarest ends are cut.

    Args:
        value_R: distinct values, increasing.
        count_R: rows of each value.
    """
    total = int(count_R.sum())
    if total == 0:
        return ONE_VALUE
    reached_R = np.cumsum(count_R)
    tail = [total >> halvings for halvings in range(7, 64) if total >> halvings > TAIL_ROWS]
    ranks = [total * step // INTEGER_STEPS for step in range(1, INTEGER_STEPS)]
    ranks += [TAIL_ROWS, *tail, *(total - rows for rows in tail), total - TAIL_ROWS]
    position_Q = np.searchsorted(reached_R, np.clip(ranks, 1, total))
    frequent_R = value_R[count_R * INTEGER_STEPS >= total]
    low, high = int(value_R[position_Q].min()), int(value_R[position_Q].max())
    edges = np.unique(np.concatenate([value_R[position_Q], frequent_R, frequent_R + 1]))
    edges = edges[(edges >= low) & (edges <= high)]
    clipped_R = np.clip(value_R, low, high)
    rows_S = np.bincount(np.searchsorted(edges, clipped_R, side="right") - 1, weights=count_R)
    return Steps(tuple(edges.tolist()), high + 1, whole_weights(rows_S.astype(np.float64)))


def rank_steps(count_R: Integers, support: int) -> Steps:
    """A frequency curve over `support` ranks from the counts of a sample.

    Args:
        count_R: rows of each category seen, in any order.
        support: categories in all, at least as many as were seen.

    Raises:
        ValueError: more categories were seen than `support`.
    """
    seen = len(count_R)
    if seen > support:
        raise ValueError(f"{seen} categories were seen, more than the published {support}")
    rows = int(count_R.sum())
    if rows == 0:
        return ONE_VALUE
    sorted_R = np.sort(count_R)[::-1]
    head = int(np.count_nonzero(sorted_R >= HEAD_COUNT)) if support > seen else seen
    share_R = sorted_R[:head] / rows
    starts = _rank_starts(support, head)
    if support == head:
        return Steps(
            tuple(starts.tolist()), support, whole_weights(np.add.reduceat(share_R, starts))
        )
    # fine pieces of the tail that meet every step's edge; whole ranks would be ten million
    tail_starts = np.unique(np.concatenate([starts[starts >= head], head + _geometric(support)]))
    edges = np.append(tail_starts[tail_starts < support], support) - head
    left = max(1.0 - float(share_R.sum()), 0.5 / rows)  # what was never seen has some weight too
    last = float(share_R[-1]) if head else 1.0
    tail_T = fit_tail(edges, last, left, seen - head, rows)
    share_P = np.concatenate([share_R, tail_T])
    first_P = np.concatenate([np.arange(head), edges[:-1] + head])
    share_S = np.add.reduceat(share_P, np.searchsorted(first_P, starts))
    return Steps(tuple(starts.tolist()), support, whole_weights(share_S))


def fit_tail(edges: Integers, last: float, mass: float, distinct: int, rows: int) -> Floats:
    """Shares of the pieces of a tail behind a head that ends at share `last`; see the module.

    Args:
        edges: first rank of each piece, counted from the end of the head, then the length.
        last: share of the last rank of the head.
        mass: what the shares add up to.
        distinct: ranks of the tail that a sample of `rows` rows has shown.
        rows: size of that sample.
    """
    width_T = np.diff(edges).astype(np.float64)
    t_T = np.sqrt((edges[:-1] + 1.0) * edges[1:])  # geometric middle of 1-based ranks
    best_T, best_error = np.zeros_like(t_T), np.inf
    for s in np.concatenate([np.arange(0.3, 3.0, 0.01), np.geomspace(3.0, 60.0, 80)]):
        share_T = _tail(t_T, width_T, float(s), mass, last)
        seen = float((width_T * -np.expm1(-rows * share_T / width_T)).sum())
        if abs(seen - distinct) < best_error:
            best_T, best_error = share_T, abs(seen - distinct)
    return best_T


def _tail(t_T: Floats, width_T: Floats, s: float, mass: float, last: float) -> Floats:
    """The curve of exponent `s` and this mass whose first share comes closest to `last`."""
    low, high = -6.0, float(np.log(t_T[-1])) + 6.0
    share_T = width_T
    for _ in range(30):
        shift = (low + high) / 2
        share_T = width_T * np.exp(-s * np.log1p((t_T - 1.0) / (1.0 + np.exp(shift))))
        share_T *= mass / share_T.sum()
        if share_T[0] / width_T[0] > last:
            low = shift  # too steep at its start
        else:
            high = shift
    return share_T


def _rank_starts(support: int, head: int) -> Integers:
    """First ranks of the steps: single ones, then ever wider; the end of the head is one."""
    starts = list(range(min(SINGLE_STEPS, support)))
    edge = float(SINGLE_STEPS)
    while edge < support:
        starts.append(int(edge))
        edge = max(edge * STEP_RATIO, edge + 1)
    if SINGLE_STEPS < head < support:
        starts.append(head)
    return np.unique(np.array(starts, np.int64))


def _geometric(support: int) -> Integers:
    return np.unique(np.geomspace(1, support, 1200).astype(np.int64)) - 1


def logistic_table() -> tuple[int, ...]:
    """Weights of a click for logits from -8 to 8, in parts of 2**32."""
    steps = range(-8 * LOGISTIC_STEPS_PER_UNIT, 8 * LOGISTIC_STEPS_PER_UNIT)
    return tuple(
        round(WEIGHT_ONE / (1.0 + math.exp(-step / LOGISTIC_STEPS_PER_UNIT))) for step in steps
    )


def calibrated(profile: Profile, mixture: tuple[float, float, float], log_loss: float) -> Profile:
    """The profile with gains and bias that give its click rate and the wanted log-loss.

    Args:
        profile: its teacher's salt, head, pairs and logistic table stay.
        mixture: standard deviations of the dense, categorical and interaction parts, up to a
            common factor.
        log_loss: expected log-loss of the teacher itself, nats.
    """
    parts = [_part(profile, which) for which in range(3)]
    shape = [share / part.std() for share, part in zip(mixture, parts, strict=True)]
    p_L = np.array(profile.teacher.logistic, np.float64) / WEIGHT_ONE
    low, high = 0.0, 8.0
    teacher = profile.teacher
    for _ in range(40):
        factor = (low + high) / 2
        gains = [max(1, round(factor * scale * UNIT)) for scale in shape]
        centred_R = sum(gain * part for gain, part in zip(gains, parts, strict=True))
        bias = _bias(np.asarray(centred_R), profile.click_rate, p_L)
        teacher = replace(
            profile.teacher,
            bias=bias,
            dense_gain=gains[0],
            categorical_gain=gains[1],
            interaction_gain=gains[2],
        )
        if expected_log_loss(_p(np.asarray(centred_R) + bias, p_L)) > log_loss:
            low = factor
        else:
            high = factor
    return replace(profile, teacher=teacher)


def expected_log_loss(p_R: Floats) -> float:
    """Mean entropy of labels drawn with these probabilities, nats."""
    return float(-(p_R * np.log(p_R) + (1 - p_R) * np.log1p(-p_R)).mean())


def _part(profile: Profile, which: int) -> Floats:
    gains = [int(which == part) for part in range(3)]
    alone = replace(
        profile.teacher,
        bias=0,
        dense_gain=gains[0],
        categorical_gain=gains[1],
        interaction_gain=gains[2],
    )
    tables = synthetic.tables_of(replace(profile, teacher=alone))
    return synthetic.score(0, CALIBRATION_ROWS, synthetic.row_key(CALIBRATION_SEED), tables)[
        0
    ].astype(np.float64)


def _p(logit_R: Floats, p_L: Floats) -> Floats:
    return p_L[synthetic.logistic_index(logit_R.astype(np.int64), len(p_L))]


def _bias(centred_R: Floats, click_rate: float, p_L: Floats) -> int:
    low, high = -32.0 * UNIT, 32.0 * UNIT
    for _ in range(32):
        bias = (low + high) / 2
        if _p(centred_R + bias, p_L).mean() > click_rate:
            high = bias
        else:
            low = bias
    return round(low)


def blank_teacher(salt: int, head_ranks: int, pairs: tuple[tuple[int, int], ...]) -> Teacher:
    """A teacher that is still to be scaled."""
    return Teacher(
        salt=salt,
        head_ranks=head_ranks,
        pairs=pairs,
        bias=0,
        dense_gain=0,
        categorical_gain=0,
        interaction_gain=0,
        logistic=logistic_table(),
    )
