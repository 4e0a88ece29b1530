"""Columns that have been read: numbers before they are standardised, and categories as they occur.

Shapes: N rows, I dense columns, M ids of a column.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.manifest import Scale
from dlrm_hybrid.data.schema import DenseColumn
from dlrm_hybrid.data.sources.cells import Key

Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Coded:
    """The categories of one column.

    Attributes:
        index_M: int32, which of `keys` each id is.
        keys: distinct categories; or an array of those of all ids, in their order.
        length_N: int32, ids of each row; None where each row has one.
    """

    index_M: npt.NDArray[np.int32]
    keys: Sequence[Key] | npt.NDArray[Any]
    length_N: npt.NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Values:
    """Good rows of any source.

    Attributes:
        row_N: int64, number in the file, from 1.
        label_N: float32, 0 or 1; None where labels were not asked for.
        dense_NI: missing ones replaced; `log1p` is done, `standardise` is not.
        categories: of each categorical column.
        time_N: the column that splits by time, comparable with its borders; else None.
    """

    row_N: npt.NDArray[np.int64]
    label_N: npt.NDArray[np.float32] | None
    dense_NI: npt.NDArray[np.floating[Any]]
    categories: tuple[Coded, ...]
    time_N: npt.NDArray[Any] | None = None


class ReadNumbers(NamedTuple):
    """Dense values before they are standardised, and what is wrong with those that are none."""

    x_N: Numbers
    faults: dict[int, str]


def transformed(x_N: Numbers, column: DenseColumn) -> ReadNumbers:
    """The numbers of a column, NaN where there is none, as they are before means are subtracted."""
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
) -> npt.NDArray[np.float32]:
    """Dense values as a model takes them: (x - mean) / deviation where a column has these.

    A value that 32 bits do not hold becomes infinite.
    """
    if dense_NI.dtype == np.float32 and not any(scales):
        return np.ascontiguousarray(dense_NI)
    means = np.array([0.0 if scale is None else scale.mean for scale in scales])
    deviations = np.array([1.0 if scale is None else scale.deviation for scale in scales])
    with np.errstate(over="ignore"):  # the caller sees what has become infinite
        return ((dense_NI - means) / deviations).astype(np.float32)
