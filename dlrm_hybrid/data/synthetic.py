"""Synthetic rows in Criteo's format, drawn from a profile, with labels from a planted teacher.

Any range of rows can be written alone: row r is a function of (seed, r) and the profile, and no
floating-point number decides a byte. The teacher adds an effect of every column and dot products of
latent vectors for a few pairs of categorical columns, so that a model that multiplies embeddings
can learn it and a linear one cannot; its own log-loss and AUC are the best that can be reached.

Shapes: C = 39 columns, S steps, L logits.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dlrm_hybrid import disk
from dlrm_hybrid.arrays import Bytes, Float64s, Int64s
from dlrm_hybrid.data.profile import NUM_CATEGORICAL, WEIGHT_ONE, Profile
from dlrm_hybrid.kernels import synthesize
from dlrm_hybrid.rng import fold
from dlrm_hybrid.types import ResourceError

BLOCK_ROWS = 16384
SCORED_ROWS = 1 << 18
TYPICAL_ROW_BYTES = 232  # for the check of free space only


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherScores:
    """Scores of the planted teacher on some rows: the best that a model can reach.

    Attributes:
        log_loss: mean of -ln p(label), nats.
        auc: area under the ROC curve; ties count half.
        base_rate: share of rows with label 1.
        rows: number of rows scored.
    """

    log_loss: float
    auc: float
    base_rate: float
    rows: int


def generate(
    path: Path, rows: int, seed: int, profile: Profile, progress: Callable[[int], None]
) -> None:
    """Write `rows` rows to `path`, which appears only when it is complete.

    Args:
        path: the file; its folder is made. An existing file is replaced.
        rows: number of rows, 0 or more.
        seed: any integer; another seed gives other rows of the same distribution and teacher.
        progress: called with the number of rows written so far, every `BLOCK_ROWS` rows.

    Raises:
        ResourceError: the disk is too small or full; names the bytes and the folder.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    needed_bytes = rows * TYPICAL_ROW_BYTES
    free_bytes = shutil.disk_usage(path.parent).free
    if needed_bytes > free_bytes:
        raise _disk_full(path, needed_bytes, free_bytes)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    key, tables = row_key(seed), tables_of(profile)

    def blocks() -> Iterator[memoryview]:
        for first in range(0, rows, BLOCK_ROWS):
            count = min(BLOCK_ROWS, rows - first)
            yield encode(first, count, key, tables)
            progress(first + count)

    try:
        disk.write(partial, blocks())
        partial.replace(path)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise _disk_full(path, needed_bytes, shutil.disk_usage(path.parent).free) from error
    finally:
        partial.unlink(missing_ok=True)


def row_key(seed: int) -> np.uint64:
    """The 64-bit key that a seed gives all its rows."""
    return np.uint64(fold(seed, "synthetic"))


def encode(first: int, rows: int, key: np.uint64, tables: synthesize.Tables) -> memoryview:
    """Rows `first` … `first + rows` as text; concatenated ranges equal one long range."""
    out = np.empty(rows * synthesize.MAX_ROW_BYTES, np.uint8)
    length = synthesize.encode_rows(first, rows, key, tables, out)
    return out[:length].data


def teacher_scores(rows: range, seed: int, profile: Profile) -> TeacherScores:
    """Score the teacher on these rows; exact, as its logits are integers.

    Args:
        rows: row numbers, step 1, not empty.
    """
    if rows.step != 1 or len(rows) == 0:
        raise ValueError(f"rows must be a range of step 1 and not empty, not {rows}")
    key, tables = row_key(seed), tables_of(profile)
    logistic = np.array(profile.teacher.logistic, np.int64)
    count_2L = np.zeros((2, len(logistic)), np.int64)
    for first in range(rows.start, rows.stop, SCORED_ROWS):
        logit_R, click_R = score(first, min(SCORED_ROWS, rows.stop - first), key, tables)
        np.add.at(count_2L, (click_R, logistic_index(logit_R, len(logistic))), 1)
    return _scores(count_2L, logistic / WEIGHT_ONE)


def score(first: int, rows: int, key: np.uint64, tables: synthesize.Tables) -> tuple[Int64s, Bytes]:
    """The teacher's logits (in 2**-20) and the labels of rows `first` … `first + rows`."""
    logit_R, click_R = np.empty(rows, np.int64), np.empty(rows, np.uint8)
    synthesize.score_rows(first, key, tables, logit_R, click_R)
    return logit_R, click_R


def logistic_index(logit_R: Int64s, entries: int) -> Int64s:
    """The entries of the logistic table for logits, rounded as in the kernel."""
    half = 1 << (synthesize.LOGIT_SHIFT - 1)
    return np.clip(((logit_R + half) >> synthesize.LOGIT_SHIFT) + entries // 2, 0, entries - 1)


def _scores(count_2L: Int64s, p_L: Float64s) -> TeacherScores:
    total, clicks = int(count_2L.sum()), int(count_2L[1].sum())
    loss = -(count_2L[1] @ np.log(p_L) + count_2L[0] @ np.log1p(-p_L)) / total
    below_L = np.cumsum(count_2L[0]) - count_2L[0]
    pairs = clicks * (total - clicks)
    wins = float(count_2L[1] @ (below_L + count_2L[0] / 2))
    return TeacherScores(
        log_loss=float(loss),
        auc=wins / pairs if pairs else float("nan"),
        base_rate=clicks / total,
        rows=total,
    )


def tables_of(profile: Profile) -> synthesize.Tables:
    """Convert a profile to arrays for the kernels."""
    columns = (*profile.integers, *profile.categoricals)
    width = 1 + max(len(column.starts) for column in columns)
    start_CS = np.zeros((len(columns), width), np.int64)
    below_CS = np.full((len(columns), width), WEIGHT_ONE, np.uint64)
    guide_CG = np.zeros((len(columns), synthesize.GUIDE_ENTRIES), np.int32)
    edge_G = np.arange(synthesize.GUIDE_ENTRIES) * (WEIGHT_ONE // synthesize.GUIDE_ENTRIES)
    for number, column in enumerate(columns):
        steps = len(column.starts)
        start_CS[number, : steps + 1] = (*column.starts, column.stop)
        below = np.concatenate([[0], np.cumsum(np.array(column.weights, np.int64))])
        below_CS[number, : steps + 1] = below
        guide_CG[number] = np.searchsorted(below, edge_G, side="right") - 1
    teacher = profile.teacher
    return synthesize.Tables(
        start_CS=start_CS,
        below_CS=below_CS,
        guide_CG=guide_CG,
        missing_C=np.array([column.missing for column in columns], np.uint64),
        missing_with_C=np.array([column.missing_with for column in columns], np.int64),
        odd_F=np.array(
            [(fold(column, "category") | 1) & 0xFFFFFFFF for column in range(NUM_CATEGORICAL)],
            np.uint64,
        ),
        pair_P2=np.array(teacher.pairs, np.int64).reshape(-1, 2),
        gains=np.array(
            [
                teacher.bias,
                teacher.dense_gain,
                teacher.categorical_gain,
                teacher.interaction_gain,
                teacher.head_ranks,
            ],
            np.int64,
        ),
        salt=np.array([teacher.salt], np.uint64),
        logistic_L=np.array(teacher.logistic, np.uint64),
    )


def _disk_full(path: Path, needed_bytes: int, free_bytes: int) -> ResourceError:
    return ResourceError(
        f"{path.parent}: synthetic rows need about {needed_bytes:,} bytes of disk, "
        f"{free_bytes:,} are free (data.rows)"
    )
