"""What a server has published of its weights: every replica equals it bit for bit.

In float32 that is the weights themselves. In half precision the rounded difference between weight
and mirror is published, and both sides add it; what rounding leaves out stays in the difference and
is published when the element changes again.

Shapes: T tensors of N elements in all, E = T + 1 offsets between them; K elements that changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.kernels.scatter import gather, publish, put, split
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.wire.dense import narrow, packed
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse_all

Array = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

SUFFIX = ".published"


def adds(sections: Sequence[Section]) -> bool:
    """Whether a pull holds differences: values come in float32, nothing else does."""
    return any(section.dtype is not Dtype.FLOAT32 for section in sections)


@final
class ReplicaMirror:
    """What every replica of a bucket is.

    Args:
        tensors: of the bucket.
        offsets_E: where each begins among the N, and the end of the last.
        weight_N: of all, updated in place.
        dtype: of values on the wire.

    Attributes:
        is_rounded: whether the mirror differs from the weights.
        value_N: the mirror; the weights themselves in float32.
    """

    def __init__(
        self, tensors: Sequence[DenseTensor], offsets_E: Int64s, weight_N: Array, dtype: Dtype
    ) -> None:
        self._ids = [tensor.id for tensor in tensors]
        self._offsets_E = offsets_E
        self._counts_T = np.diff(offsets_E)
        self._dtype = dtype
        self._weight_N = weight_N
        self.is_rounded = dtype is not Dtype.FLOAT32
        self.value_N = weight_N.copy() if self.is_rounded else weight_N

    def publish_all(self) -> list[Section]:
        """Publish all elements; the sections may view the weights."""
        sent_N = self._weight_N
        if self.is_rounded:
            sent_N = narrow(self._weight_N - self.value_N, self._dtype)
            np.add(self.value_N, sent_N, out=self.value_N)
        bounds = self._offsets_E[1:-1]
        return [
            packed(number, values_N, self._dtype)
            for number, values_N in zip(self._ids, np.split(sent_N, bounds), strict=True)
        ]

    def publish(self, indices_K: Int32s, weight_K: Array) -> list[Section]:
        """Publish the elements that changed, and no others.

        Args:
            indices_K: increasing, among the N.
            weight_K: the weights there.
        """
        sent_K = weight_K
        if self._dtype is Dtype.BFLOAT16:
            sent_K = np.empty_like(weight_K)
            publish(indices_K, weight_K, self.value_N, sent_K)
        elif self.is_rounded:
            value_K = np.empty_like(weight_K)
            gather(indices_K, self.value_N, value_K)
            sent_K = narrow(weight_K - value_K, self._dtype)
            put(indices_K, value_K + sent_K, self.value_N)
        splits_E, local_K = np.empty_like(self._offsets_E), np.empty_like(indices_K)
        split(self._offsets_E, indices_K, splits_E, local_K)
        return sparse_all(self._ids, self._counts_T, splits_E, local_K, sent_K, self._dtype)
