"""Initial values, drawn tensor by tensor from streams named after the tensors.

So a tensor's values depend on the seed and its name alone, not on order, layout or rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt

import torch
from torch import Tensor

from dlrm_hybrid.rng import fold


def draw_dense(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill weights (out, in) with N(0, 2/(in + out)) and biases (out,) with N(0, 1/out).

    N(mean, variance); the laws of facebookresearch/dlrm.
    """
    for name, tensor in tensors.items():
        variance = 1 / len(tensor) if tensor.dim() == 1 else 2 / sum(tensor.shape)
        with torch.no_grad():
            tensor.normal_(0.0, sqrt(variance), generator=_stream(seed, name))


def draw_embeddings(tables: Mapping[str, Tensor], seed: int) -> None:
    """Fill tables (rows, D) with U(-1/sqrt(rows), 1/sqrt(rows)), as facebookresearch/dlrm."""
    for name, table in tables.items():
        bound = 1 / sqrt(len(table))
        table.uniform_(-bound, bound, generator=_stream(seed, name))


def _stream(seed: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(fold(seed, "initialise", name))
