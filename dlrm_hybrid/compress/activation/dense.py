"""Activations as they are: what every other codec is measured against.

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.activation.codec import Key, Saved, Sections
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.frame import Dtype, Encoding


@final
class DenseCodec:
    """Every element as float32."""

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Saved]:
        """One section that views x_BN; the shape is kept."""
        return (dense(0, x_BN.numpy()),), x_BN.shape

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Saved]:
        """The activations; nothing is kept."""
        return _tensor(sections, shape, key), None

    def encode_gradient(self, g_BN: Tensor, saved: Saved, key: Key) -> Sections:
        """One section that views g_BN."""
        return (dense(0, g_BN.numpy()),)

    def decode_gradient(self, sections: Sections, saved: Saved, key: Key) -> Tensor:
        """The gradient."""
        return _tensor(sections, saved, key)


def _tensor(sections: Sections, shape: torch.Size, key: Key) -> Tensor:
    found = [(section.encoding, section.dtype, section.count) for section in sections]
    if found != [(Encoding.DENSE, Dtype.FLOAT32, shape.numel())]:
        raise DlrmError(
            f"step {key.step}, boundary {key.boundary}, micro-batch {key.microbatch}: "
            f"{_shown(found)}, expected DENSE FLOAT32 of {' x '.join(map(str, shape))} elements"
        )
    tensor = torch.empty(shape)
    np.copyto(tensor.view(-1).numpy(), array_of(sections[0]))
    return tensor


def _shown(found: list[tuple[Encoding, Dtype, int]]) -> str:
    shown = (f"{encoding.name} {dtype.name} of {count}" for encoding, dtype, count in found)
    return ", ".join(shown) or "nothing"
