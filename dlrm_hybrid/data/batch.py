"""One batch of rows as the model reads it.

Shapes: B rows, I = 13 integer features, F = 26 categorical features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for the model; the arrays belong to the receiver.

    Attributes:
        dense_BI: float32, log(x + 1) of the integer features, negatives taken as 0.
        ids_FB: int64, feature-major and contiguous, row numbers of the embedding tables.
        label_B: float32, 0 or 1.
    """

    dense_BI: npt.NDArray[np.float32]
    ids_FB: npt.NDArray[np.int64]
    label_B: npt.NDArray[np.float32]
