"""Numbers of dense columns to what is prepared of them, the same for files and for single rows.

Shapes: N rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.data.schema import DenseColumn

Numbers = npt.NDArray[np.float64]


class Dense(NamedTuple):
    """Dense values before they are standardised, and what is wrong with those that are none."""

    x_N: Numbers
    faults: dict[int, str]


def transformed(x_N: Numbers, column: DenseColumn) -> Dense:
    """The numbers of a column, NaN where there is none, as they are before means are subtracted."""
    faults = dict.fromkeys(np.flatnonzero(np.isinf(x_N)).tolist(), "is infinite")
    x_N = np.where(np.isnan(x_N), column.missing, x_N)
    if column.transform == "log1p":
        x_N = np.log1p(np.maximum(x_N, 0.0))
    for index in np.flatnonzero(is_beyond(x_N)).tolist():
        faults.setdefault(index, "is outside 32 bits")
    return Dense(x_N, faults)


def is_beyond(x: Numbers) -> npt.NDArray[np.bool_]:
    """Where numbers are no finite ones of 32 bits."""
    with np.errstate(over="ignore"):
        return ~np.isfinite(x.astype(np.float32))
