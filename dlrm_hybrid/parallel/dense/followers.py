"""Replicas that each get versions of their own: which elements each still lacks.

Shapes: N elements of a bucket, K of them that have moved.
"""

from __future__ import annotations

from typing import final

import numpy as np
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.kernels.magnitudes import compact
from dlrm_hybrid.kernels.scatter import gather, put
from dlrm_hybrid.parallel.dense.mirror import (
    Array,
    Int32s,
    Mirror,
    Published,
    ReplicaMirror,
    SparseChange,
)
from dlrm_hybrid.types import DlrmError

# Updates are numbered by the bits of float32, which order as their values do, from the smallest
# that is not subnormal to the largest: so the kernel that lists large values lists late stamps, in
# a third of numpy's time.
_FIRST, _LAST = 0x00800000, 0x7F7FFFFF


@final
class Stamps:
    """The last update that moved each element of a bucket.

    Args:
        weight_N: weights of the bucket, updated in place.

    Attributes:
        updates: number of the last one.
    """

    def __init__(self, weight_N: Array) -> None:
        self.updates = _FIRST
        self._weight_N = weight_N
        self._stamp_N = np.zeros(weight_N.size, np.float32)
        self._late_N = np.empty(weight_N.size, np.int32)
        self._all_moved = 0  # last update that moved all; saves writing N stamps

    def moved(self, indices_K: Int32s | None) -> None:
        """Record an update that moved these elements; None for all.

        Raises:
            DlrmError: more than 2.1e9 updates in one attempt.
        """
        if self.updates == _LAST:
            raise DlrmError(f"more than {_LAST - _FIRST} updates of a bucket in one attempt")
        self.updates += 1
        if indices_K is None:
            self._all_moved = self.updates
        else:
            stamp_K = np.full(indices_K.size, _stamp(self.updates), np.float32)
            put(indices_K, stamp_K, self._stamp_N)

    def since(self, update: int) -> SparseChange | None:
        """The elements moved after this update, None for all; valid until the next call."""
        if self._all_moved > update:
            return None
        count = compact(self._stamp_N, _stamp(update + 1), self._late_N)
        return self.at(self._late_N[:count])

    def at(self, indices_K: Int32s) -> SparseChange:
        """Look up the weights of these elements."""
        weight_K = np.empty(indices_K.size, np.float32)
        gather(indices_K, self._weight_N, weight_K)
        return SparseChange(indices_K, weight_K)


def _stamp(update: int) -> float:
    """The float32 with these bits."""
    return float(np.uint32(update).view(np.float32))


@final
class Follower(Mirror):
    """The replica of one worker, which is sent what has moved since its last version.

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
        """Make the replica equal to the weights; returns the float32 values to send.

        Args:
            everything: send every element; else the replica is known to equal `value_N`.
        """
        lacks = self._lacks()
        differs_N = self._mirror.differs()
        if everything:
            lacks = None
        elif differs_N is not None:
            lacks = self._stamps.at(np.flatnonzero(differs_N).astype(np.int32))
        return self._mirror.equalize(lacks)

    @override
    def tensors(self) -> dict[str, Tensor]:
        """Nothing: at a checkpoint every replica is made equal to the weights."""
        return {}

    def _lacks(self) -> SparseChange | None:
        change = self._stamps.since(self._sent)
        self._sent = self._stamps.updates
        return change
