"""What travels over a boundary between two stages, as sections of a frame.

    sender                                        receiver
    encode           ──── activations ────▶       decode
    decode_gradient  ◀─── their gradients ────    encode_gradient

Shapes: B rows of a micro-batch, N width of the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import ClassVar, NamedTuple, Protocol, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.compress.device import rows as device_rows
from dlrm_hybrid.compress.gradient.rule import target_k
from dlrm_hybrid.compress.host import host_array, require_host
from dlrm_hybrid.compress.report import SentReport, Tally
from dlrm_hybrid.kernels import magnitudes
from dlrm_hybrid.kernels.magnitudes import RowSelection
from dlrm_hybrid.kernels.scatter import gather, put
from dlrm_hybrid.kernels.sections import scatter_bfloat16
from dlrm_hybrid.types import DivergedError, DlrmError
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

    What it leaves alone travels dense. All tensors are float32 (B, N), detached and contiguous, and
    on the host.

    What `decode` and `decode_gradient` return is memory allocated by torch, never a view of the
    payload: MKL rounds products differently where an operand lies at an address that is no
    multiple of 16, and a payload may lie anywhere.
    """

    selects_anywhere: ClassVar[bool] = False
    """Whether it encodes tensors on a device too, and copies to the host what it has selected."""

    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        """Encode activations at their sender; the sections may view x_BN.

        Raises:
            DivergedError: an activation is not finite, where the codec looks at them.
            ValueError: x_BN is not contiguous float32 on the CPU.
        """
        return (dense(0, host_array(x_BN, "activation", key)),), None

    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Mask]:
        """Decode activations at their receiver; raises DlrmError if they have another shape."""
        return dense_tensor(sections, shape, key), None

    def encode_gradient(self, g_BN: Tensor, mask: Mask, key: Key) -> Sections:
        """Encode the gradient of what `decode` returned with `mask`; sections may view g_BN.

        Raises:
            DivergedError: a sum of gradient and residual is not finite, where there is a residual.
            ValueError: g_BN is not contiguous float32 on the CPU.
        """
        return (dense(0, host_array(g_BN, "gradient of activations", key)),)

    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        """Decode the gradient of what `encode` returned with `mask`; raises as `decode`."""
        return dense_tensor(sections, shape, key)

    def tensors(self) -> dict[str, Tensor]:
        """Views of all state that lasts from step to step, for checkpoints."""
        return {}

    def report(self) -> SentReport | None:
        """What was sent since the last call; None if nothing was, or all is sent unobserved."""
        return None


@final
class DenseCodec(ActivationCodec):
    """Sends activations and gradients as they are: what every other codec is measured against.

    Args:
        observe: a sparsity in [0, 1) whose thresholds are measured and reported, as in figure 5 of
            Gupta et al., KDD 2021; None for none.
    """

    def __init__(self, observe: float | None = None) -> None:
        self._observe = observe
        self._tally = Tally()

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        section = dense(0, host_array(x_BN, "activation", key))
        if self._observe is not None:
            largest = largest_of_rows(x_BN, self._observe, key)
            self._tally.add(x_BN.numel(), x_BN.numel(), largest.tau_B)
        return (section,), None

    @override
    def report(self) -> SentReport | None:
        return self._tally.take()


def largest_of_rows(x_BN: Tensor, sparsity: float, key: Key) -> RowSelection:
    """Select in every row the elements that reach its threshold, but no zeros (DCT-MP).

    Raises:
        DivergedError: an activation is not finite; names batch, boundary and micro-batch.
        ValueError: the tensor is on the CPU, and not contiguous float32.

    Source: Gupta et al., KDD 2021, algorithm 2.
    """
    k = target_k(x_BN.shape[1], sparsity)
    if x_BN.is_cpu:
        selected = magnitudes.largest_of_rows(host_array(x_BN, "activation", key), k)
    else:
        selected = device_rows.largest_of_rows(x_BN, k)
    if selected is None:
        raise DivergedError(f"{key}: an activation is not finite")
    return selected


def kept_gradients(g_BN: Tensor, mask: Mask, key: Key) -> tuple[Int32s, Float32s]:
    """The mask, and the gradients of the elements it keeps; raises as `largest_of_rows`."""
    assert mask is not None
    if not g_BN.is_cpu:
        return mask, device_rows.elements_at(g_BN, mask)
    values_K = np.empty(mask.size, np.float32)
    gather(mask, host_array(g_BN, "gradient of activations", key).reshape(-1), values_K)
    return mask, values_K


def only_section(
    sections: Sections, dtype: Dtype, shape: Sequence[int], key: Key, *, dense: bool
) -> Section:
    """Require that a message is one section of this type and shape, with `dense` a DENSE one.

    Raises:
        DlrmError: the message is another; names batch, boundary and micro-batch.
    """
    for section in sections if len(sections) == 1 else ():
        is_fitting = (section.dtype, section.count) == (dtype, prod(shape))
        if is_fitting and (section.encoding is Encoding.DENSE or not dense):
            return section
    expected = f"{'DENSE ' if dense else ''}{dtype.name} of {' x '.join(map(str, shape))} elements"
    raise DlrmError(f"{key}: {listed(sections)}, expected {expected}")


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
    """The sections of a message, for errors."""
    shown = (f"{s.encoding.name} {s.dtype.name} of {s.count}" for s in sections)
    return ", ".join(shown) or "nothing"
