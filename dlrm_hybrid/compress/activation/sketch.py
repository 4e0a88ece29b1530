"""Activations through a random projection: the paper's first negative control.

x (B, N) crosses as x S, with S (N, C) drawn anew for every micro-batch from a seed that both ends
know; the receiver computes with x S S', whose mean over S is x. Its noise has (N + 1) / C times the
energy of x: that is why it fails. The gradient crosses whole and goes through S S' at the sender,
exactly as autograd would take it.

Shapes: B rows of a micro-batch, N width of the boundary, C columns of the sketch.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid import rng
from dlrm_hybrid.compress.activation.codec import (
    ActivationCodec,
    BoundaryReport,
    Key,
    Saved,
    Sections,
    Tally,
    dense_tensor,
)
from dlrm_hybrid.compress.host import host_array, require_host
from dlrm_hybrid.wire.dense import dense

_NO_THRESHOLDS = np.empty(0, np.float32)


class _Sketched(NamedTuple):
    projection_NC: Tensor
    shape: torch.Size


@final
class SketchCodec(ActivationCodec):
    """A Gaussian sketch of the activations (Gupta et al., KDD 2021, table 6)."""

    def __init__(self, *, sparsity: float, seed: int) -> None:
        """For any number of boundaries.

        Args:
            sparsity: fraction of the columns that is saved, in [0, 1).
            seed: of the run; the same at both ends.
        """
        self._sparsity = sparsity
        self._seed = seed
        self._tally = Tally()

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        require_host(x_BN, "activation", key)
        projection_NC = self._projection(x_BN.shape[1], key)
        sketch_BC = x_BN @ projection_NC
        self._tally.add(key.boundary, x_BN.numel(), sketch_BC.numel(), _NO_THRESHOLDS)
        return (dense(0, sketch_BC.numpy()),), _Sketched(projection_NC, x_BN.shape)

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        projection_NC = self._projection(shape[1], key)
        sketch_shape = torch.Size((shape[0], projection_NC.shape[1]))
        return dense_tensor(sections, sketch_shape, key) @ projection_NC.T, None

    @override
    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        return (dense(0, host_array(g_BN, "gradient of activations", key)),)

    @override
    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        sketched: _Sketched = saved
        g_BN = dense_tensor(sections, sketched.shape, key)
        return g_BN @ sketched.projection_NC @ sketched.projection_NC.T

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {}

    @override
    def report(self) -> dict[int, BoundaryReport]:
        return self._tally.take()

    def _projection(self, width: int, key: Key) -> Tensor:
        """Normal numbers of variance 1 / C, (N, C)."""
        columns = max(1, round((1 - self._sparsity) * width))
        seed = rng.fold(self._seed, "sketch", key.batch, key.boundary, key.microbatch)
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(width, columns, generator=generator) / sqrt(columns)
