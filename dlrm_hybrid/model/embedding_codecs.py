"""Half-precision pooled embeddings and gradients on the wire, for TorchRec's codec registry.

TorchRec's own are not used: its BF16 becomes FP16 on a CPU without a word, and its FP16 lets
gradients below 6e-8 vanish and rounds those below 6e-5 ever more coarsely.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torchrec.distributed.types import CommOp, QuantizedCommCodecs

from dlrm_hybrid.model.sharding_options import CommPrecision

FLOAT16_GRADIENT_SCALE = 2.0**16
"""Gradients of a mean loss are far below 1: from 1 on they become infinite and the run fails."""


@final
@dataclass(frozen=True, slots=True)
class Cast:
    """Multiplies by a power of two and casts; a codec as TorchRec's QuantizedCommCodec asks."""

    dtype: torch.dtype
    scale: float

    def encode(self, input_tensor: Tensor, ctx: object = None) -> Tensor:
        """Float32 → `dtype`."""
        return _times(input_tensor, self.scale).to(self.dtype)

    def decode(self, input_grad: Tensor, ctx: object = None) -> Tensor:
        """`dtype` → float32."""
        return _times(input_grad.float(), 1.0 / self.scale)

    @property
    def quantized_dtype(self) -> torch.dtype:
        """The type on the wire."""
        return self.dtype

    def calc_quantized_size(self, input_len: int, ctx: object = None) -> int:
        """Elements on the wire."""
        return input_len

    def create_context(self) -> None:
        """Nothing is remembered between the two ends."""

    def padded_size(
        self, input_tensor: Tensor, dim_per_rank: Sequence[int], my_rank: int, qcomm_ctx: object
    ) -> tuple[int, int]:
        """Width of a row on the wire and how much of it is padding."""
        return input_tensor.shape[-1], 0


def _times(tensor: Tensor, factor: float) -> Tensor:
    return tensor if factor == 1.0 else tensor * factor


_CODECS: Mapping[CommPrecision, tuple[Cast, Cast]] = {
    CommPrecision.FLOAT16: (
        Cast(torch.float16, 1.0),
        Cast(torch.float16, FLOAT16_GRADIENT_SCALE),
    ),
    CommPrecision.BFLOAT16: (Cast(torch.bfloat16, 1.0), Cast(torch.bfloat16, 1.0)),
}


@final
@dataclass(frozen=True, slots=True)
class Rounding:
    """What pooled rows and their gradients become on the way, for tables that do not travel."""

    precision: CommPrecision

    def pooled(self, pooled: Tensor) -> Tensor:
        """Rows as the trainers see them."""
        return self._there_and_back(pooled, 0)

    def gradient(self, gradient: Tensor) -> Tensor:
        """A trainer's part of the gradient as the tables see it."""
        return self._there_and_back(gradient, 1)

    def _there_and_back(self, tensor: Tensor, direction: int) -> Tensor:
        if self.precision is CommPrecision.FLOAT32:
            return tensor
        cast = _CODECS[self.precision][direction]
        return cast.decode(cast.encode(tensor))


def casts(precision: CommPrecision) -> tuple[Cast, Cast]:
    """Of rows, and of gradients, on the wire."""
    plain = Cast(torch.float32, 1.0)
    return _CODECS.get(precision, (plain, plain))


def codec_registry(precision: CommPrecision) -> dict[str, QuantizedCommCodecs] | None:
    """What TorchRec's sharder takes; None for float32."""
    if precision is CommPrecision.FLOAT32:
        return None
    forward, backward = _CODECS[precision]
    codecs = QuantizedCommCodecs(forward=forward, backward=backward)  # pyright: ignore
    operations = (CommOp.POOLED_EMBEDDINGS_ALL_TO_ALL, CommOp.POOLED_EMBEDDINGS_REDUCE_SCATTER)
    return {operation.name: codecs for operation in operations}
