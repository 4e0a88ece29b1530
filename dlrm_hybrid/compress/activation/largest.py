"""The largest magnitudes of every row of activations.

Shapes: B rows of a micro-batch, N width of the boundary, K elements kept of all B * N.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import Key
from dlrm_hybrid.compress.address import address_of
from dlrm_hybrid.compress.gradient.thresholds.rule import keep_count
from dlrm_hybrid.kernels.rows import encode_rows
from dlrm_hybrid.types import DivergedError

Float32s = NDArray[np.float32]


class Largest(NamedTuple):
    """What a row's threshold lets through.

    Attributes:
        indices_K: int32, flat positions, ascending.
        values_K: float32, none of them 0; a view of memory for all elements.
        tau_B: float32, the thresholds.
    """

    indices_K: NDArray[np.int32]
    values_K: Float32s
    tau_B: Float32s


def largest_of_rows(x_BN: Tensor, sparsity: float, key: Key) -> Largest:
    """In every row what reaches the element that a sparsity names, zeros excepted.

    Args:
        x_BN: float32, contiguous.
        sparsity: fraction of a row that lies below its threshold, in [0, 1).

    Raises:
        DivergedError: an activation is not finite; names batch, boundary and micro-batch.

    Source: Gupta et al., KDD 2021, algorithm 2.
    """
    rows, width = x_BN.shape
    indices_N = np.empty(rows * width, np.int32)
    values_N = np.empty(rows * width, np.float32)
    tau_B = np.empty(rows, np.float32)
    keep = keep_count(width, sparsity)
    kept = encode_rows(address_of(x_BN), rows, width, keep, indices_N, values_N, tau_B)
    if kept < 0:
        raise DivergedError(f"{key}: an activation is not finite")
    return Largest(indices_N[:kept].copy(), values_N[:kept], tau_B)
