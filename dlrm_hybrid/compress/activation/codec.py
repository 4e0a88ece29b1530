"""What travels over a boundary between two stages, as sections of a frame.

    sender                                        receiver
    encode           ──── activations ────▶       decode
    decode_gradient  ◀─── their gradients ────    encode_gradient

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.compress.host import host_array, require_host
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.kernels.scatter import put
from dlrm_hybrid.kernels.sections import scatter_bfloat16
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.dense import array_of, dense, payload_of, values_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section

Sections = tuple[Section, ...]
Mask = Int32s | None
"""Flat positions of the elements that travelled forward, ascending; None where all did."""


class Key(NamedTuple):
    """Names one transfer of activations: its batch, boundary and micro-batch, from 0."""

    batch: int
    boundary: int
    microbatch: int

    def __str__(self) -> str:
        return f"batch {self.batch}, boundary {self.boundary}, micro-batch {self.microbatch}"


class ActivationCodec(Protocol):
    """Compresses what crosses one boundary between pipeline stages, at both of its ends.

    All tensors are float32 (B, N), detached and contiguous.

    What `decode` and `decode_gradient` return is memory allocated by torch, never a view of the
    payload: MKL rounds products differently where an operand lies at an address that is no
    multiple of 16, and a payload may lie anywhere.
    """

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        """Encode activations at their sender; the sections may view x_BN.

        Raises:
            DivergedError: an activation is not finite, where the codec looks at them.
            ValueError: x_BN is not contiguous float32 on the CPU.
        """
        ...

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Mask]:
        """Decode activations at their receiver; raises DlrmError if they have another shape."""
        ...

    def encode_gradient(self, g_BN: Tensor, mask: Mask, key: Key) -> Sections:
        """Encode the gradient of what `decode` returned with `mask`; sections may view g_BN.

        Raises:
            DivergedError: a sum of gradient and residual is not finite, where there is a residual.
            ValueError: g_BN is not contiguous float32 on the CPU.
        """
        ...

    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        """Decode the gradient of what `encode` returned with `mask`; raises as `decode`."""
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Views of all state that lasts from step to step, for checkpoints."""
        return {}

    def report(self) -> SentReport | None:
        """What was sent since the last call; None if nothing was, or all is sent unobserved."""
        return None


def only_section(
    sections: Sections, dtype: Dtype, shape: Sequence[int], key: Key, *, dense: bool
) -> Section:
    """Require that a message is one section of this type and shape; DENSE, or of any encoding.

    Raises:
        DlrmError: there is none, another or one more; names batch, boundary and micro-batch.
    """
    for section in sections if len(sections) == 1 else ():
        is_fitting = (section.dtype, section.count) == (dtype, prod(shape))
        if is_fitting and (section.encoding is Encoding.DENSE or not dense):
            return section
    expected = f"{'DENSE ' if dense else ''}{dtype.name} of {' x '.join(map(str, shape))} elements"
    raise DlrmError(f"{key}: {listed(sections)}, expected {expected}")


def dense_sections(tensor: Tensor, what: str, key: Key) -> Sections:
    """Encode a tensor as it is, for `dense_tensor`; `what` names its kind in messages.

    Raises:
        ValueError: it is not contiguous float32 on the CPU.
    """
    return (dense(0, host_array(tensor, what, key)),)


def dense_tensor(sections: Sections, shape: torch.Size, key: Key) -> Tensor:
    """Decode a dense float32 tensor into memory of torch; raises as `only_section`."""
    section = only_section(sections, Dtype.FLOAT32, shape, key, dense=True)
    tensor = torch.empty(shape)
    array = host_array(tensor, "received", "activation")
    np.copyto(array.reshape(-1), array_of(section))
    return tensor


def scattered(indices_K: Int32s, values_K: Float32s, shape: torch.Size) -> Tensor:
    """A tensor with K values at ascending flat positions and 0 elsewhere."""
    tensor = torch.empty(shape)
    array = host_array(tensor, "received", "activation")
    array.fill(0)
    put(indices_K, values_K, array.reshape(-1))
    return tensor


def scattered_section(indices_K: Int32s, section: Section, shape: torch.Size) -> Tensor:
    """As `scattered`, the values being those of a dense section; raises as `values_of`."""
    if section.dtype is not Dtype.BFLOAT16:
        return scattered(indices_K, values_of(section), shape)
    tensor = torch.empty(shape)
    require_host(tensor, "received", "activation")
    scatter_bfloat16(indices_K, payload_of(section), tensor.data_ptr(), tensor.numel())
    return tensor


def listed(sections: Sections) -> str:
    """What a message holds, for messages of errors."""
    shown = (f"{one.encoding.name} {one.dtype.name} of {one.count}" for one in sections)
    return ", ".join(shown) or "nothing"
