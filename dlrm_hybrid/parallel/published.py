"""What a server has told its workers of its weights: every replica equals it bit for bit.

In float32 that is the weights themselves. In half precision a worker is told the rounded difference
between weight and published copy, and both sides add it; what rounding leaves out stays in the
difference and is told when the element changes again.

K elements that changed, N elements of a tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.parallel.changes import Array, Changes, Indices, follow
from dlrm_hybrid.parallel.sections import flat_views
from dlrm_hybrid.parallel.topology import DenseTensor
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse
from dlrm_hybrid.wire.values import narrow, packed

SUFFIX = ".published"


def adds(section: Section) -> bool:
    """Whether a section of a pull holds differences: values come in float32, nothing else does."""
    return section.dtype is not Dtype.FLOAT32


@final
class Published:
    """The published copies of a server's tensors.

    Args:
        weights: by name, learned in place.
        dtype: of values on the wire.
    """

    def __init__(self, weights: Mapping[str, Tensor], dtype: Dtype) -> None:
        self._dtype = dtype
        self._weights = flat_views(weights)
        self._shapes = {name: weight.shape for name, weight in weights.items()}
        self.values = self._weights
        if dtype is not Dtype.FLOAT32:
            self.values = {name: array.copy() for name, array in self._weights.items()}

    def tell(self, tensor: DenseTensor, indices_K: Indices | None) -> Section:
        """Publish the elements that changed, None for all; the section may view the weights."""
        weight_N = self._weights[tensor.name]
        if self._dtype is Dtype.FLOAT32:
            return _values(tensor, weight_N, indices_K)
        published_N = self.values[tensor.name]
        if indices_K is None:
            rounded_N = narrow(weight_N - published_N, self._dtype)
            np.add(published_N, rounded_N, out=published_N)
            return packed(tensor.id, rounded_N, self._dtype)
        rounded_K = narrow(weight_N[indices_K] - published_N[indices_K], self._dtype)
        follow(published_N, Changes(indices_K, rounded_K), adds=True)
        return sparse(tensor.id, tensor.count, indices_K, rounded_K, self._dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Views of the copies that are not the weights themselves, for a checkpoint."""
        if self._dtype is Dtype.FLOAT32:
            return {}
        return {
            f"{name}{SUFFIX}": torch.from_numpy(array).view(self._shapes[name])
            for name, array in self.values.items()
        }


def _values(tensor: DenseTensor, weight_N: Array, indices_K: Indices | None) -> Section:
    if indices_K is None:
        return dense(tensor.id, weight_N)
    return sparse(tensor.id, tensor.count, indices_K, weight_N[indices_K], Dtype.FLOAT32)
