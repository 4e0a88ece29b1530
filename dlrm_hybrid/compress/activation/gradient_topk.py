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

from dlrm_hybrid.compress.activation.codec import Key, Saved, Sections
from dlrm_hybrid.compress.activation.dense import DenseCodec
from dlrm_hybrid.compress.activation.received import only_section, scattered
from dlrm_hybrid.compress.activation.report import BoundaryReport, Tally
from dlrm_hybrid.compress.gradient.thresholds.rule import keep_count
from dlrm_hybrid.kernels.histogram import magnitude_of_rank
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import sparse, sparse_of
from dlrm_hybrid.wire.values import narrow

Float32s = NDArray[np.float32]


@final
class GradientTopKCodec:
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

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        """As `DenseCodec`."""
        return self._dense.encode(x_BN, key)

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        """As `DenseCodec`."""
        return self._dense.decode(sections, shape, key)

    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        """The largest of gradient plus residual; the residual keeps the rest.

        Raises:
            DivergedError: a sum is not finite; the residual is then as before.
        """
        residual_BN = self._residuals[key.boundary, key.microbatch][: g_BN.shape[0]]
        sum_BN = g_BN + residual_BN
        sum_N = sum_BN.view(-1).numpy()
        if not np.isfinite(sum_N).all():
            raise DivergedError(f"{key}: a gradient of the activations is not finite")
        keep = keep_count(sum_N.size, self._sparsity)
        tau = magnitude_of_rank(sum_N, keep)
        indices_K = _largest(np.abs(sum_N), keep, np.float32(tau))
        values_K = narrow(sum_N[indices_K], self._dtype)
        sum_N[indices_K] -= values_K
        residual_BN.copy_(sum_BN)
        self._tally.add(key.boundary, sum_N.size, indices_K.size, np.array([tau], np.float32))
        return (sparse(0, sum_N.size, indices_K, values_K, self._dtype),)

    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        """The gradient, 0 where nothing was sent."""
        shape: torch.Size = saved
        kept = sparse_of(only_section(sections, self._dtype, shape, key, dense=False))
        return scattered(kept.indices_K, kept.values_K, shape)

    def tensors(self) -> dict[str, Tensor]:
        """The residuals, float32 (B, N), one for each boundary and micro-batch number."""
        return {
            f"boundary.{boundary}.microbatch.{microbatch}.residual": residual_BN
            for (boundary, microbatch), residual_BN in self._residuals.items()
        }

    def report(self) -> dict[int, BoundaryReport]:
        """What was sent backward, with the mean of the smallest magnitudes sent."""
        return self._tally.take()


def _largest(sizes_N: Float32s, keep: int, tau: np.float32) -> NDArray[np.int32]:
    """Rising positions of the `keep` largest sizes, zeros excepted; of equal ones the first.

    Args:
        sizes_N: not negative.
        tau: the size of rank `keep`.
    """
    places_K = np.flatnonzero((sizes_N >= tau) & (sizes_N > 0))
    surplus = places_K.size - keep
    if surplus > 0:
        ties = np.flatnonzero(sizes_N[places_K] == tau)
        places_K = np.delete(places_K, ties[-surplus:])
    return places_K.astype(np.int32)
