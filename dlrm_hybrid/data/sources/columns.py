"""Columns as read from a source: numbers before they are standardised, and category keys.

Shapes: N rows, I dense columns, M ids of a column, L labels if there are several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.arrays import Bools, Float32s, Float64s, Int32s, Int64s
from dlrm_hybrid.data.manifest import Scale
from dlrm_hybrid.data.schema import DenseColumn, Label
from dlrm_hybrid.data.sources.cells import Key


@dataclass(frozen=True, slots=True)
class Coded:
    """The categories of one column, dictionary-encoded.

    Attributes:
        index_M: int32, index into `keys` of each id.
        keys: distinct categories; or an array of the categories of all ids, in order.
        length_N: int32, number of ids of each row; None if each row has one.
        weight_M: float32, weight of each id, if the schema has them.
    """

    index_M: Int32s
    keys: Sequence[Key] | npt.NDArray[Any]
    length_N: Int32s | None = None
    weight_M: Float32s | None = None


class LabelValue(NamedTuple):
    """A value of a label's `positive`, as a category."""

    label: Label
    key: Key


def numbers_of(
    add: Callable[[Coded, Bools | None], Int32s],
    several: Sequence[Coded],
    known_N: Bools | None,
) -> list[Int32s]:
    """The numbers of the ids of a table's columns, which appear row by row.

    Args:
        add: numbers ids; those that its second argument selects are counted, all if it is None.
        known_N: rows whose ids are counted; None for all.
    """
    if len(several) == 1:
        length_N = several[0].length_N
        if known_N is not None and length_N is not None:
            known_N = np.repeat(known_N, length_N)
        return [add(several[0], known_N)]
    merged, row_M, order_M = _row_by_row(several)
    number_M = np.empty(len(row_M), np.int32)
    number_M[order_M] = add(merged, None if known_N is None else known_N[row_M])
    return np.split(number_M, np.cumsum([len(ids.index_M) for ids in several])[:-1])


def _row_by_row(several: Sequence[Coded]) -> tuple[Coded, Int64s, Int64s]:
    """Put the ids of columns together row by row, within each row in the columns' order.

    Returns:
        The ids, the row of each, and its place among the ids of one column after the other.
    """
    row_of: list[Int64s] = []
    for ids in several:
        length_N = np.ones(len(ids.index_M), np.int32) if ids.length_N is None else ids.length_N
        row_of.append(np.repeat(np.arange(len(length_N)), length_N))
    row_M = np.concatenate(row_of)
    order_M = np.argsort(row_M, kind="stable")
    starts = np.cumsum([0, *(len(ids.keys) for ids in several)]).tolist()
    index_M = np.concatenate([ids.index_M + k for ids, k in zip(several, starts, strict=False)])
    keys: list[Any] = [key for ids in several for key in ids.keys]
    return Coded(index_M[order_M].astype(np.int32), keys), row_M[order_M], order_M


@dataclass(frozen=True, slots=True)
class Values:
    """Good rows of any source.

    Attributes:
        row_N: int64, row number in the file, from 1.
        label_N: float32, 0 or 1; (N, L) if there are several labels, None if not asked for.
        dense_NI: dense values: missing ones replaced, `log1p` applied, `standardise` not yet.
        time_N: the column that splits by time, comparable with its borders; else None.
        weight_N: float32, weights of the rows if the schema has them and labels were asked for.
        group_N: int64, a hash of each row's group, likewise; 0 without a group.
        drawn_N: int64, likewise a hash of the value that draws the row's part.
        positives: values of labels' `positive` that rows have.
    """

    row_N: Int64s
    label_N: Float32s | None
    dense_NI: npt.NDArray[np.floating[Any]]
    categories: tuple[Coded, ...]
    time_N: npt.NDArray[Any] | None = None
    weight_N: Float32s | None = None
    group_N: Int64s | None = None
    drawn_N: Int64s | None = None
    positives: frozenset[LabelValue] = frozenset()


class ReadNumbers(NamedTuple):
    """Dense values before they are standardised, and the fault of each invalid one by index."""

    x_N: Float64s
    faults: dict[int, str]


def transformed(x_N: Float64s, column: DenseColumn) -> ReadNumbers:
    """Replace the missing numbers (NaN) of a column and apply `log1p` if that is its transform."""
    faults = dict.fromkeys(np.flatnonzero(np.isinf(x_N)).tolist(), "is infinite")
    x_N = np.where(np.isnan(x_N), column.missing, x_N)
    if column.transform == "log1p":
        x_N = np.log1p(np.maximum(x_N, 0.0))
    with np.errstate(over="ignore"):
        is_beyond_N = ~np.isfinite(x_N.astype(np.float32))
    for index in np.flatnonzero(is_beyond_N).tolist():
        faults.setdefault(index, "is outside 32 bits")
    return ReadNumbers(x_N, faults)


def standardised(
    dense_NI: npt.NDArray[np.floating[Any]], scales: Sequence[Scale | None]
) -> Float32s:
    """Standardise the columns that have a scale, (x - mean) / deviation, and convert to float32.

    A value beyond float32 becomes infinite.
    """
    if dense_NI.dtype == np.float32 and not any(scales):
        return np.ascontiguousarray(dense_NI)
    means = np.array([0.0 if scale is None else scale.mean for scale in scales])
    deviations = np.array([1.0 if scale is None else scale.deviation for scale in scales])
    with np.errstate(over="ignore"):  # the caller checks for infinite values
        return ((dense_NI - means) / deviations).astype(np.float32)
