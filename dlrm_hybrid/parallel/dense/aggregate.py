"""The mean of the trainers' gradients of a bucket, dense or sparse ones.

Sums are made in trainer order, element by element: the same pushes give the same bits whether they
came dense or sparse.

Shapes: T tensors of N elements in all, E = T + 1 offsets between them; K elements that any trainer
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.compress.host import addresses_of
from dlrm_hybrid.compress.update import DenseUpdate, SparseUpdate, Update
from dlrm_hybrid.kernels.scatter import collect, mean_of_all, scatter_add

Array = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

WORD_BITS = 64


class Mean(NamedTuple):
    """Of all tensors of a bucket, concatenated.

    Attributes:
        indices_K: increasing; None for all elements.
        values_K: float32.
        is_finite: whether every value is.
        units: of each tensor that which all trainers share, of `DenseUpdate.units`, or None.
    """

    indices_K: Int32s | None
    values_K: Array
    is_finite: bool
    units: Sequence[float | None]


@final
class Aggregate:
    """Keeps the buffers of a bucket between updates.

    Args:
        offsets_E: where each tensor begins among the N, and the end of the last.
    """

    def __init__(self, offsets_E: Int64s) -> None:
        self._offsets_E = offsets_E
        elements = int(offsets_E[-1])
        self._mean_N = np.empty(elements, np.float32)
        self._sum_N = np.zeros(elements, np.float32)
        self._touched_W = np.zeros(-(-elements // WORD_BITS), np.uint64)
        self._indices_N = np.empty(elements, np.int32)

    def mean(self, pushes: Sequence[Update]) -> Mean:
        """The mean over all trainers; who sent nothing of an element counts with 0.

        The result may view a buffer: it lasts until the next call.
        """
        dense = [push for push in pushes if isinstance(push, DenseUpdate)]
        if len(dense) == len(pushes):
            return self._dense(dense)
        for push in pushes:
            sparse = push if isinstance(push, SparseUpdate) else self._every_element(push)
            scatter_add(self._offsets_E, *sparse, self._sum_N, self._touched_W)
        count = collect(self._touched_W, self._sum_N, self._indices_N, self._mean_N)
        indices_K, mean_K = self._indices_N[:count], self._mean_N[:count]
        np.divide(mean_K, np.float32(len(pushes)), out=mean_K)
        return Mean(indices_K, mean_K, bool(np.isfinite(mean_K).all()), ())

    def _dense(self, pushes: Sequence[DenseUpdate]) -> Mean:
        # The kernel reads float32 at addresses that are multiples of 4.
        given = [values_N for push in pushes for values_N in push.values]
        aligned = [np.require(values_N, requirements="A") for values_N in given]
        addresses_XT = addresses_of(aligned).reshape(len(pushes), -1)
        is_finite = mean_of_all(addresses_XT, self._offsets_E, self._mean_N)
        units_T = [
            several[0] if len(set(several)) == 1 else None
            for several in zip(*(push.units for push in pushes), strict=True)
        ]
        return Mean(None, self._mean_N, is_finite, units_T)

    def _every_element(self, push: DenseUpdate) -> SparseUpdate:
        """The same, with every element named."""
        indices = [np.arange(values_N.size, dtype=np.int32) for values_N in push.values]
        return SparseUpdate(self._offsets_E, np.concatenate(indices), np.concatenate(push.values))
