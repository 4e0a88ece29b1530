"""The dense tensors of a stage as one flat vector, and a choice of its elements.

Shapes: N elements of T tensors, K of them chosen; E = T + 1 offsets, the first of each tensor's
elements and the end of the last's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int32s, Int64s


@dataclass(frozen=True, slots=True)
class Spec:
    """Number, name and shape of a tensor whose gradient is sent.

    Attributes:
        id: its number on the wire, `Section.tensor`.
        name: its name among the parameters.
        shape: of the parameter and of its gradient.
    """

    id: int
    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@final
@dataclass(frozen=True)
class Layout:
    """The dense tensors of a stage, concatenated to one flat vector of N elements.

    Attributes:
        specs: the tensors, in their order there.
    """

    specs: Sequence[Spec]

    @cached_property
    def ids(self) -> list[int]:
        """The numbers of the tensors on the wire."""
        return [spec.id for spec in self.specs]

    @cached_property
    def names(self) -> list[str]:
        """The names of the tensors."""
        return [spec.name for spec in self.specs]

    @cached_property
    def counts(self) -> list[int]:
        """Elements of each tensor."""
        return [spec.count for spec in self.specs]

    @cached_property
    def sizes(self) -> Int64s:
        """Elements of each tensor, int64 (T)."""
        return np.array(self.counts, np.int64)

    @cached_property
    def offsets(self) -> Int64s:
        """First element of each tensor in the flat vector, then N; int64 (E)."""
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self.sizes)])

    @property
    def size(self) -> int:
        """N, elements of all tensors."""
        return int(self.offsets[-1])

    def parts(self, flat_N: Float32s) -> list[Float32s]:
        """A flat view of each tensor in a vector of this layout."""
        return np.split(flat_N, self.offsets[1:-1])

    def room(self) -> list[Tensor]:
        """Empty tensors of this layout: float32 on the CPU, whatever torch's defaults are."""
        return [*self.tensors(np.empty(self.size, np.float32), "").values()]

    def tensors(self, flat_N: Float32s, what: str) -> dict[str, Tensor]:
        """Views "<tensor>.<what>" in the tensors' shapes: how checkpoints name a vector's parts."""
        return {
            f"{spec.name}.{what}": torch.from_numpy(part_N).view(spec.shape)
            for spec, part_N in zip(self.specs, self.parts(flat_N), strict=True)
        }


@final
class Indices:
    """K elements of a layout, in increasing order.

    Args:
        layout: of the vector.
        splits_E: int64, where the elements of each tensor begin among the K, then K.
        local_K: int32, their indices within their tensors.
    """

    def __init__(self, layout: Layout, splits_E: Int64s, local_K: Int32s) -> None:
        self._layout = layout
        self.splits_E = splits_E
        self.local_K = local_K

    @classmethod
    def of_flat(cls, layout: Layout, flat_K: Int32s) -> Indices:
        """Make it from increasing indices in the flat vector, int32 (K)."""
        offsets_E = layout.offsets.astype(np.int32)  # of one type with the indices, none is copied
        splits_E = np.searchsorted(flat_K, offsets_E)
        indices = cls(layout, splits_E, flat_K - np.repeat(offsets_E[:-1], np.diff(splits_E)))
        indices.flat = flat_K
        return indices

    @cached_property
    def flat(self) -> Int32s:
        """The indices in the flat vector, int32 (K)."""
        starts_K = np.repeat(self._layout.offsets[:-1], self.counts)
        return self.local_K + starts_K.astype(np.int32)

    @cached_property
    def counts(self) -> Int64s:
        """The number of chosen elements of each tensor, int64 (T)."""
        return self.splits_E[1:] - self.splits_E[:-1]  # np.diff takes five times as long
