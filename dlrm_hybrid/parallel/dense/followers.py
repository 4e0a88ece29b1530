"""Replicas that are each sent versions of their own: which elements they lack.

Shapes: N elements of a bucket, K of them that have moved.
"""

from __future__ import annotations

from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.kernels.scatter import gather
from dlrm_hybrid.parallel.dense.mirror import (
    Array,
    Int32s,
    Mirror,
    Published,
    ReplicaMirror,
    SparseChange,
)


@final
class Stamps:
    """The update that has moved each element of a bucket last.

    Args:
        weight_N: weights of the bucket, updated in place.

    Attributes:
        updates: until now, as `moved` has counted them.
    """

    def __init__(self, weight_N: Array) -> None:
        self.updates = 0
        self._weight_N = weight_N
        self._stamp_N = np.zeros(weight_N.size, np.uint32)
        self._all_moved = 0  # by this update; saves writing as many stamps

    def moved(self, indices_K: Int32s | None) -> None:
        """Count an update of these elements; None for all."""
        self.updates += 1
        if indices_K is None:
            self._all_moved = self.updates
        else:
            self._stamp_N[indices_K] = self.updates

    def since(self, update: int) -> SparseChange | None:
        """The elements that have moved after this update; None for all."""
        if self._all_moved > update:
            return None
        return self.at(self._stamp_N > update)

    def at(self, chosen_N: NDArray[np.bool_]) -> SparseChange:
        """These elements with their weights."""
        indices_K = np.flatnonzero(chosen_N).astype(np.int32)
        weight_K = np.empty(indices_K.size, np.float32)
        gather(indices_K, self._weight_N, weight_K)
        return SparseChange(indices_K, weight_K)


@final
class Follower(Mirror):
    """What one worker's replica is, which is sent all that has moved since it was sent something.

    Args:
        mirror: of the replica.
        stamps: of the bucket.
    """

    def __init__(self, mirror: ReplicaMirror, stamps: Stamps) -> None:
        self._mirror = mirror
        self._stamps = stamps
        self._sent = stamps.updates
        self.value_N = mirror.value_N

    @override
    def publish(self, change: SparseChange | None, number: int) -> Published:
        return self._mirror.publish(self._lacks(), number)

    def equalize(self, *, everything: bool) -> Published:
        """Make the replica equal to the weights, and say how in float32.

        Args:
            everything: whatever the replica is; else it is known to equal `value_N`.
        """
        lacks = self._lacks()
        differs_N = self._mirror.differs()
        if everything:
            lacks = None
        elif differs_N is not None:
            lacks = self._stamps.at(differs_N)
        return self._mirror.equalize(lacks)

    @override
    def tensors(self) -> dict[str, Tensor]:
        """Nothing: at a checkpoint every replica is made equal to the weights."""
        return {}

    def _lacks(self) -> SparseChange | None:
        change = self._stamps.since(self._sent)
        self._sent = self._stamps.updates
        return change
