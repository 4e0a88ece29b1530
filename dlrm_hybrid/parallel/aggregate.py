"""The mean of the trainers' gradients of one tensor, whole ones or a few elements of each.

Sums are made in trainer order, element by element: the same pushes give the same bits whether they
came whole or in part. K elements that any trainer sent, N elements of the tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np

from dlrm_hybrid.kernels.scatter import collect, scatter_add, take
from dlrm_hybrid.parallel.changes import Array, Changes, whole
from dlrm_hybrid.parallel.mean import mean_into

WORD_BITS = 64


@final
class Aggregate:
    """Keeps the buffers of one tensor between steps.

    Args:
        count: N.
    """

    def __init__(self, count: int) -> None:
        self._mean_N = np.empty(count, np.float32)
        self._sum_N = np.zeros(count, np.float32)
        self._touched_W = np.zeros(-(-count // WORD_BITS), np.uint64)
        self._indices_N = np.empty(count, np.int32)

    def mean(self, gradients: Sequence[Changes]) -> Changes:
        """The mean over all trainers; who sent nothing of an element counts with 0.

        The result may view a buffer or the only gradient: it lasts until the next call.
        """
        if any(gradient.indices_K is None for gradient in gradients):
            return Changes(None, self._whole(gradients))
        if len(gradients) == 1:
            return gradients[0]
        for indices_K, values_K in gradients:
            assert indices_K is not None
            scatter_add(indices_K, values_K, self._sum_N, self._touched_W)
        count = collect(self._touched_W, self._indices_N)
        union_K = self._indices_N[:count]
        mean_K = np.empty(count, np.float32)
        take(self._sum_N, union_K, mean_K)
        np.divide(mean_K, np.float32(len(gradients)), out=mean_K)
        return Changes(union_K, mean_K)

    def _whole(self, gradients: Sequence[Changes]) -> Array:
        count = len(self._sum_N)
        spread = [
            gradient if gradient.indices_K is None else whole(gradient, count)
            for gradient in gradients
        ]
        mean_into(self._mean_N, [gradient.values_K for gradient in spread])
        return self._mean_N
