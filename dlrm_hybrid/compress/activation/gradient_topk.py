"""Gradients of activations by top-k with error feedback: the paper's second negative control.

What is left out is added to the gradient of the next step, row by row, though those rows are then
other samples: that is why it fails. Activations cross whole.

Shapes: B rows of a micro-batch, N width of the boundary, K elements kept of all B * N.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.activation.codec import (
    ActivationCodec,
    BoundaryReport,
    Key,
    Saved,
    Sections,
    Tally,
    only_section,
    scattered,
)
from dlrm_hybrid.compress.activation.dense import DenseCodec
from dlrm_hybrid.compress.gradient.selector import largest
from dlrm_hybrid.compress.gradient.thresholds.rule import target_k
from dlrm_hybrid.compress.host import require_host
from dlrm_hybrid.kernels.ops import NUMBA
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import sparse, sparse_of

Float32s = NDArray[np.float32]


@final
class GradientTopKCodec(ActivationCodec):
    """The largest of a micro-batch's gradients (Gupta et al., KDD 2021, table 7)."""

    def __init__(
        self,
        *,
        sparsity: float,
        dtype: Dtype,
        widths: Mapping[int, int],
        rows: int,
        microbatches: int,
    ) -> None:
        """For one worker: the residuals are its own.

        Args:
            sparsity: fraction of a gradient that is left out, in [0, 1).
            dtype: of the values of gradients on the wire: FLOAT32, BFLOAT16 or FLOAT16.
            widths: of the boundaries that the worker sends gradients over, by number.
            rows: of a micro-batch; later ones may have fewer and use the first of the residual.
            microbatches: of a step.
        """
        self._sparsity = sparsity
        self._dtype = dtype
        self._residuals = {
            (boundary, microbatch): torch.zeros(rows, width)
            for boundary, width in widths.items()
            for microbatch in range(microbatches)
        }
        self._dense = DenseCodec()
        self._tally = Tally()

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        return self._dense.encode(x_BN, key)

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        return self._dense.decode(sections, shape, key)

    @override
    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        residual_BN = self._residuals[key.boundary, key.microbatch][: g_BN.shape[0]]
        require_host(g_BN, "gradient of activations", key)
        sum_BN = g_BN + residual_BN
        sum_N = sum_BN.view(-1).numpy()
        if not np.isfinite(sum_N).all():
            raise DivergedError(f"{key}: a gradient of the activations is not finite")
        k = target_k(sum_N.size, self._sparsity)
        tau = NUMBA.kth_magnitude(sum_N, k)
        indices_K = largest(sum_N, k, NUMBA)
        values_K = narrow(sum_N[indices_K], self._dtype)
        sum_N[indices_K] -= values_K
        residual_BN.copy_(sum_BN)
        self._tally.add(key.boundary, sum_N.size, indices_K.size, np.array([tau], np.float32))
        return (sparse(0, sum_N.size, indices_K, values_K, self._dtype),)

    @override
    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        shape: torch.Size = saved
        kept = sparse_of(only_section(sections, self._dtype, shape, key, dense=False))
        return scattered(kept.indices_K, kept.values_K, shape)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {
            f"boundary.{boundary}.microbatch.{microbatch}.residual": residual_BN
            for (boundary, microbatch), residual_BN in self._residuals.items()
        }

    @override
    def report(self) -> dict[int, BoundaryReport]:
        return self._tally.take()
