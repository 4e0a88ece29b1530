"""The mean of the trainers' gradients of a unit, whole ones or a few elements of each.

Sums are made in trainer order, element by element: the same pushes give the same bits whether they
came whole or in part.

Shapes: T tensors of N elements in all, E = T + 1 places between which they lie; K elements that any
trainer sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.compress.address import addresses_of
from dlrm_hybrid.compress.update import DenseUpdate, SparseUpdate, Update
from dlrm_hybrid.kernels.mean import mean_of_all
from dlrm_hybrid.kernels.scatter import collect, scatter_add, take

Array = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

WORD_BITS = 64


class Mean(NamedTuple):
    """Of all tensors of a unit, one behind the other.

    Attributes:
        places_K: ascending; None for all elements.
        values_K: float32.
        is_finite: whether every value is.
        units: of each tensor that which all trainers share, of `DenseUpdate.units`, or None.
    """

    places_K: Int32s | None
    values_K: Array
    is_finite: bool
    units: Sequence[float | None]


@final
class Aggregate:
    """Keeps the buffers of a unit between steps.

    Args:
        firsts_E: where each tensor begins among the N, and the end of the last.
    """

    def __init__(self, firsts_E: Int64s) -> None:
        self._firsts_E = firsts_E
        elements = int(firsts_E[-1])
        self._mean_N = np.empty(elements, np.float32)
        self._sum_N = np.zeros(elements, np.float32)
        self._touched_W = np.zeros(-(-elements // WORD_BITS), np.uint64)
        self._places_N = np.empty(elements, np.int32)

    def mean(self, pushes: Sequence[Update]) -> Mean:
        """The mean over all trainers; who sent nothing of an element counts with 0.

        The result may view a buffer: it lasts until the next call.
        """
        whole = [push for push in pushes if isinstance(push, DenseUpdate)]
        if len(whole) == len(pushes):
            return self._of_whole(whole)
        for push in pushes:
            parts = push if isinstance(push, SparseUpdate) else self._parts(push)
            scatter_add(self._firsts_E, *parts, self._sum_N, self._touched_W)
        count = collect(self._touched_W, self._places_N)
        places_K = self._places_N[:count]
        mean_K = np.empty(count, np.float32)
        take(self._sum_N, places_K, mean_K)
        np.divide(mean_K, np.float32(len(pushes)), out=mean_K)
        return Mean(places_K, mean_K, bool(np.isfinite(mean_K).all()), ())

    def _of_whole(self, pushes: Sequence[DenseUpdate]) -> Mean:
        # The kernel reads float32 at addresses that are multiples of 4.
        given = [values_N for push in pushes for values_N in push.values]
        aligned = [np.require(values_N, requirements="A") for values_N in given]
        addresses_XT = addresses_of(aligned).reshape(len(pushes), -1)
        is_finite = mean_of_all(addresses_XT, self._firsts_E, self._mean_N)
        units_T = [
            several[0] if len(set(several)) == 1 else None
            for several in zip(*(push.units for push in pushes), strict=True)
        ]
        return Mean(None, self._mean_N, is_finite, units_T)

    def _parts(self, push: DenseUpdate) -> SparseUpdate:
        """The same, with every element named."""
        indices = [np.arange(values_N.size, dtype=np.int32) for values_N in push.values]
        return SparseUpdate(self._firsts_E, np.concatenate(indices), np.concatenate(push.values))
