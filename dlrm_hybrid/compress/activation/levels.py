"""DCT-MP with values of few bits: kept activations and their gradients as levels of a row's step.

What is kept is as in `compress.activation.dct`. Values are rounded to the nearest level, but what
is kept keeps at least one level: it is not 0 to the receiver, and its gradient comes back. What
rounding takes from a gradient joins that of the same unit in the micro-batch's next row.
Positions, steps and levels are coded by how often they were seen (`wire.activation_levels`). The
coding loses nothing, and its tables come anew from each sender that begins: they are in no
checkpoint.

Shapes: B rows of a micro-batch, N width of the boundary, K elements kept of all B * N.
"""

from __future__ import annotations

from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.compress.activation.codec import (
    ActivationCodec,
    Key,
    Mask,
    Sections,
    kept_gradients,
    largest_of_rows,
    listed,
)
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.compress.report import SentReport, Tally
from dlrm_hybrid.kernels.levels.steps import quantise, restore
from dlrm_hybrid.types import DivergedError, DlrmError
from dlrm_hybrid.wire.activation_levels import Format, Levels, UnitReceiver, UnitSender
from dlrm_hybrid.wire.section import Dtype, Section

LIFESPAN = 200  # messages that tables serve at most; weights move, and with them what is frequent


@final
class LevelCodec(ActivationCodec):
    """DCT-MP (Gupta et al., KDD 2021, algorithm 2) with integer levels, coded by their frequency.

    Args:
        sparsity: fraction of a row that is left out, in [0, 1).
        bits: of an activation, which is not negative behind a ReLU; a gradient has as many, and one
            of them is its sign. From 3 to 8.
    """

    selects_anywhere = True

    def __init__(self, *, sparsity: float, bits: int) -> None:
        self._sparsity = sparsity
        self._bits = bits
        self._tally = Tally()
        # By whether gradients travel. Tests have both ends of a boundary here, worlds never.
        self._senders: dict[bool, UnitSender] = {}
        self._receivers: dict[bool, UnitReceiver] = {}

    @override
    def encode(self, x_BN: Tensor, key: Key) -> tuple[Sections, Mask]:
        largest = largest_of_rows(x_BN, self._sparsity, key)
        indices_K = largest.indices_K
        self._tally.add(x_BN.numel(), indices_K.size, largest.tau_B)
        format = self._format(x_BN.shape, is_gradient=False)
        levels = _quantised(indices_K, largest.values_K, x_BN.shape, format, key)
        return (self._sender(format).section(levels),), indices_K

    @override
    def decode(self, sections: Sections, shape: torch.Size, key: Key) -> tuple[Tensor, Mask]:
        section = _only_bytes(sections, shape, key)
        levels = self._receiver(self._format(shape, is_gradient=False)).levels(section, shape[0])
        return _restored(levels, shape), levels.indices_K

    @override
    def encode_gradient(self, g_BN: Tensor, mask: Mask, key: Key) -> Sections:
        format = self._format(g_BN.shape, is_gradient=True)
        levels = _quantised(*kept_gradients(g_BN, mask, key), g_BN.shape, format, key)
        return (self._sender(format).section(levels),)

    @override
    def decode_gradient(
        self, sections: Sections, shape: torch.Size, mask: Mask, key: Key
    ) -> Tensor:
        assert mask is not None
        section = _only_bytes(sections, shape, key)
        receiver = self._receiver(self._format(shape, is_gradient=True))
        return _restored(receiver.levels(section, shape[0], mask), shape)

    @override
    def report(self) -> SentReport | None:
        return self._tally.take()

    def _format(self, shape: torch.Size, *, is_gradient: bool) -> Format:
        return Format(shape[1], self._bits - is_gradient, is_gradient)

    def _sender(self, format: Format) -> UnitSender:
        if format.is_gradient not in self._senders:
            self._senders[format.is_gradient] = UnitSender(format, LIFESPAN)
        return self._senders[format.is_gradient]

    def _receiver(self, format: Format) -> UnitReceiver:
        if format.is_gradient not in self._receivers:
            self._receivers[format.is_gradient] = UnitReceiver(format)
        return self._receivers[format.is_gradient]


def _quantised(
    indices_K: Int32s, values_K: Float32s, shape: torch.Size, format: Format, key: Key
) -> Levels:
    """The levels of kept values; what is kept of activations has one at least.

    Raises:
        DivergedError: a value is not finite; names batch, boundary and micro-batch.
    """
    levels_K, codes_B = np.empty(indices_K.size, np.int16), np.empty(shape[0], np.int16)
    bits, is_gradient = format.bits, format.is_gradient
    if not quantise(indices_K, values_K, shape[1], bits, is_gradient, levels_K, codes_B):
        what = "a gradient of the activations" if is_gradient else "an activation"
        raise DivergedError(f"{key}: {what} is not finite")
    return Levels(indices_K, levels_K, codes_B)


def _restored(levels: Levels, shape: torch.Size) -> Tensor:
    """Level times step, and 0 elsewhere."""
    tensor = torch.empty(shape)
    restore(*levels, host_array(tensor, "received", "activation"))
    return tensor


def _only_bytes(sections: Sections, shape: torch.Size, key: Key) -> Section:
    """Require that a message is one section of bytes; raises as `only_section`."""
    if len(sections) == 1 and sections[0].dtype is Dtype.UINT8:
        return sections[0]
    expected = f"levels of {shape[0]} x {shape[1]} elements"
    raise DlrmError(f"{key}: {listed(sections)}, expected {expected}")
