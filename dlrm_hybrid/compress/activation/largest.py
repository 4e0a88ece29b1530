"""The largest magnitudes of every row of activations.

Shapes: B rows of a micro-batch, N width of the boundary, K elements kept of all B * N.
"""

from __future__ import annotations

from torch import Tensor

from dlrm_hybrid.compress.activation.codec import Key
from dlrm_hybrid.compress.gradient.thresholds.rule import target_k
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.kernels.ops import NUMBA, Ops, RowSelection
from dlrm_hybrid.types import DivergedError


def largest_of_rows(x_BN: Tensor, sparsity: float, key: Key, ops: Ops = NUMBA) -> RowSelection:
    """In every row what reaches the element that a sparsity names, zeros excepted.

    Args:
        x_BN: float32, contiguous.
        sparsity: fraction of a row that lies below its threshold, in [0, 1).
        key: for messages.
        ops: to compute with.

    Raises:
        DivergedError: an activation is not finite; names batch, boundary and micro-batch.
        ValueError: the tensor is not contiguous float32 on the CPU.

    Source: Gupta et al., KDD 2021, algorithm 2.
    """
    x = host_array(x_BN, "activation", key)
    selected = ops.topk_rows(x, target_k(x_BN.shape[1], sparsity))
    if selected is None:
        raise DivergedError(f"{key}: an activation is not finite")
    return selected
