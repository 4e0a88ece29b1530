"""The paper's two negative controls: ways to compress that fail (Gupta et al., KDD 2021).

Shapes: B rows of a micro-batch, N width of the boundary, C columns of a sketch, K elements kept of
all B * N.
"""

from __future__ import annotations

from math import sqrt
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.activation.codec import (
    ActivationCodec,
    Key,
    Mask,
    Sections,
    dense_tensor,
    only_section,
    scattered,
)
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.compress.gradient.selector import largest
from dlrm_hybrid.compress.host import require_host
from dlrm_hybrid.compress.report import SentReport, Tally
from dlrm_hybrid.kernels.magnitudes import kth_magnitude
from dlrm_hybrid.rng import fold
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.dense import dense, narrow
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import sparse, sparse_of

_NO_THRESHOLDS = np.empty(0, np.float32)


@final
class SketchCodec(ActivationCodec):
    """Sends activations through a random projection (Gupta et al., KDD 2021, table 6).

    x (B, N) is sent as x S, with S (N, C) drawn anew for every micro-batch from a seed that both
    ends know; the receiver computes with x S S', whose mean over S is x. Its noise has (N + 1) / C
    times the energy of x: that is why it fails. The gradient is sent dense and goes through S S' at
    the sender, exactly as autograd would take it.

    Args:
        sparsity: fraction of the columns that is saved, in [0, 1).
        seed: of the run; the same at both ends.
    """

    def __init__(self, *, sparsity: float, seed: int) -> None:
        self._sparsity = sparsity
        self._seed = seed
        self._tally = Tally()

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        require_host(x_BN, "activation", key)
        projection_NC = self._projection(x_BN.shape[1], key)
        sketch_BC = x_BN @ projection_NC
        self._tally.add(x_BN.numel(), sketch_BC.numel(), _NO_THRESHOLDS)
        return (dense(0, sketch_BC.numpy()),), None

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Mask]:
        projection_NC = self._projection(shape[1], key)
        sketch_shape = torch.Size((shape[0], projection_NC.shape[1]))
        return dense_tensor(sections, sketch_shape, key) @ projection_NC.T, None

    @override
    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        projection_NC = self._projection(shape[1], key)
        return dense_tensor(sections, shape, key) @ projection_NC @ projection_NC.T

    @override
    def report(self) -> SentReport | None:
        return self._tally.take()

    def _projection(self, width: int, key: Key) -> Tensor:
        """Normal numbers of variance 1 / C, (N, C)."""
        columns = max(1, round((1 - self._sparsity) * width))
        seed = fold(self._seed, "sketch", key.batch, key.boundary, key.microbatch)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(width, columns, generator=generator) / sqrt(columns)


@final
class GradientTopKCodec(ActivationCodec):
    """Sends the largest gradients of activations, with error feedback, as in table 7 of the paper.

    What is not sent is added to the gradient of the next step, row by row, though those rows are
    then other samples: that is why it fails. Activations are sent dense.

    Args:
        sparsity: fraction of a gradient that is left out, in [0, 1).
        dtype: of the values of gradients on the wire: FLOAT32, BFLOAT16 or FLOAT16.
        shape: B and N; later micro-batches may have fewer rows and use the first of the residual.
        microbatches: of a step, each with a residual; 0 where this end receives the gradients.
    """

    def __init__(
        self, *, sparsity: float, dtype: Dtype, shape: tuple[int, int], microbatches: int
    ) -> None:
        self._sparsity = sparsity
        self._dtype = dtype
        self._residuals = [torch.zeros(shape) for _ in range(microbatches)]
        self._tally = Tally()

    @override
    def encode_gradient(self, g_BN: Tensor, mask: Mask, key: Key) -> Sections:
        residual_BN = self._residuals[key.microbatch][: g_BN.shape[0]]
        require_host(g_BN, "gradient of activations", key)
        sum_BN = g_BN + residual_BN
        sum_N = sum_BN.view(-1).numpy()
        if not np.isfinite(sum_N).all():
            raise DivergedError(f"{key}: a gradient of the activations is not finite")
        k = target_k(sum_N.size, self._sparsity)
        tau = kth_magnitude(sum_N, k)
        indices_K = largest(sum_N, k)
        values_K = narrow(sum_N[indices_K], self._dtype)
        sum_N[indices_K] -= values_K
        residual_BN.copy_(sum_BN)
        self._tally.add(sum_N.size, indices_K.size, np.array([tau], np.float32))
        return (sparse(0, sum_N.size, indices_K, values_K, self._dtype),)

    @override
    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        elements = sparse_of(only_section(sections, self._dtype, shape, key, dense=False))
        return scattered(elements.indices_K, elements.values_K, shape)

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {f"microbatch.{i}.residual": tensor for i, tensor in enumerate(self._residuals)}

    @override
    def report(self) -> SentReport | None:
        return self._tally.take()
