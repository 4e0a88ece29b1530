"""What waits of the tensors of a stage, as one vector of which agreed elements leave.

Shapes: T tensors of N elements in all, K that leave, E = T + 1 places between which tensors lie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport, without_threshold
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse_all
from dlrm_hybrid.wire.values import narrow

Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]


@final
class Residuals:
    """Of one trainer.

    Args:
        specs: of the tensors.
        dtype: of the values that leave; what rounding takes stays here.

    Attributes:
        specs: as given.
        firsts_E: int64, where each tensor begins, and the end of the last.
        residual_N: float32, of all.
    """

    def __init__(self, specs: Sequence[Spec], dtype: Dtype) -> None:
        self.specs: Sequence[Spec] = tuple(specs)
        self._dtype = dtype
        self._counts_T = np.array([spec.count for spec in specs], np.int64)
        self.firsts_E = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._counts_T)])
        self.residual_N = np.zeros(self.firsts_E[-1], np.float32)
        self._residuals = np.split(self.residual_N, self.firsts_E[1:-1])
        self._start_report()

    def add(self, gradients: Mapping[str, Tensor], step: int) -> None:
        """Let the gradients of a step join.

        Raises:
            DivergedError: a sum is not finite; names step and tensor.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            for spec, residual_N in zip(self.specs, self._residuals, strict=True):
                np.add(residual_N, gradients[spec.name].numpy().reshape(-1), out=residual_N)
            # An element that is not finite makes the sum so; finite ones only near the limit.
            if math.isfinite(float(self.residual_N.sum())):
                return
        for spec, residual_N in zip(self.specs, self._residuals, strict=True):
            if not np.isfinite(residual_N).all():
                raise DivergedError(
                    f"step {step + 1}: the gradient of {spec.name} is not finite; "
                    "optimizer.lr or embedding.lr may be too high"
                )

    def take(self, indices_K: Int32s) -> dict[str, Section]:
        """Sections of the elements at these places of the vector, zeros included; they leave.

        Args:
            indices_K: int32, rising from 0 to N - 1.
        """
        values_K = self.residual_N[indices_K]
        rounded_K = narrow(values_K, self._dtype)
        self.residual_N[indices_K] = values_K - rounded_K
        bounds_E, places_K = split_places(indices_K, self.firsts_E)
        sections = sparse_all(
            *([spec.id for spec in self.specs], self._counts_T, bounds_E),
            *(places_K, rounded_K, self._dtype),
        )
        self._steps += 1
        self._sent_T += np.diff(bounds_E)
        return {spec.name: section for spec, section in zip(self.specs, sections, strict=True)}

    def tensors(self) -> dict[str, Tensor]:
        """Views "<tensor>.residual" of the tensor's shape."""
        return {
            f"{spec.name}.residual": torch.from_numpy(residual_N).view(spec.shape)
            for spec, residual_N in zip(self.specs, self._residuals, strict=True)
        }

    def report(self) -> dict[str, TensorReport]:
        """Counts since the last report, by tensor; there are no thresholds."""
        reports = {
            spec.name: without_threshold(self._steps * spec.count, sent)
            for spec, sent in zip(self.specs, self._sent_T.tolist(), strict=True)
        }
        self._start_report()
        return reports

    def _start_report(self) -> None:
        self._steps = 0
        self._sent_T = np.zeros(len(self.specs), np.int64)


def split_places(indices_K: Int32s, firsts_E: Int64s) -> tuple[Int64s, Int32s]:
    """Where the elements of each tensor begin among the K, and their places in their tensors.

    Args:
        indices_K: int32, rising places in the vector of all tensors.
        firsts_E: where each tensor begins there, and the end of the last.
    """
    bounds_E = np.searchsorted(indices_K, firsts_E)
    return bounds_E, indices_K - np.repeat(firsts_E[:-1], np.diff(bounds_E)).astype(np.int32)
