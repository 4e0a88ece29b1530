"""The six primitives in plain torch operations: for any device, and the oracle of the tests.

Each follows its definition in `kernels.ops.Ops` and nothing else. Selections equal those of the
kernels; sums may differ in the last bits of float64.

Shapes: N elements, K selected, B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.kernels.ops import Int64s, Moments, Ops, RowSelection, Selected

Float32s = NDArray[np.float32]

_SMALLEST = 1e-45  # as a threshold it keeps just the zeros out
_WORD = 0xFFFFFFFF
_GAMMA, _ODD = 0x9E3779B97F4A7C15, 0x9E3779B9
_FIRST, _SECOND = 0x21F0AAAD, 0xD35A2D97


@final
class TorchOps(Ops):
    """The primitives of `Ops` in torch operations on any device.

    Arrays go to the device and come back; on the CPU they are only viewed.

    Args:
        device: where to compute.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._device = torch.device(device)

    @override
    def accumulate_select(
        self,
        gradients: Sequence[Tensor | None],
        residual_N: Float32s,
        taus_T: Float32s,
        offsets_E: Int64s,
        selected: Selected,
    ) -> int:
        at, offsets = 0, offsets_E.tolist()
        selected.splits_E[0] = 0
        for tensor, gradient in enumerate(gradients):
            own_N = residual_N[offsets[tensor] : offsets[tensor + 1]]
            x_N = self._moved(own_N)
            if gradient is not None:
                x_N = x_N + gradient.to(self._device).view(-1)
            if not x_N.isfinite().all():
                return tensor
            leaves_N = reaching(x_N, float(taus_T[tensor]))
            local_K = leaves_N.nonzero().view(-1)
            end = at + local_K.numel()
            selected.local_N[at:end] = local_K.int().cpu().numpy()
            selected.values_N[at:end] = x_N[local_K].cpu().numpy()
            own_N[:] = x_N.masked_fill(leaves_N, 0).cpu().numpy()
            selected.splits_E[tensor + 1] = at = end
        return -1

    @override
    def compact(self, values_N: Float32s, tau: float) -> NDArray[np.int32]:
        return reaching(self._moved(values_N), tau).nonzero().view(-1).int().cpu().numpy()

    @override
    def kth_magnitude(self, values_N: Float32s, k: int) -> float:
        bits_N = self._moved(values_N).view(torch.int32) & 0x7FFFFFFF  # NaN above infinity
        kth = bits_N.kthvalue(values_N.size - k + 1).values
        return float(kth.view(torch.float32).item())

    @override
    def topk_rows(self, x_BN: Float32s, k: int) -> RowSelection | None:
        x = self._moved(x_BN)
        if not x.isfinite().all():
            return None
        tau_B1 = x.abs().kthvalue(x.shape[1] - k + 1, dim=1, keepdim=True).values
        indices_K = ((x.abs() >= tau_B1) & (x != 0)).view(-1).nonzero().view(-1)
        values_K = x.view(-1)[indices_K]
        return RowSelection(
            indices_K.int().cpu().numpy(), values_K.cpu().numpy(), tau_B1.view(-1).cpu().numpy()
        )

    @override
    def moments(self, values_N: Float32s, shift: float = 0.0) -> Moments:
        x_N = self._moved(values_N).double()
        over_N = x_N.abs() - shift
        largest = self.kth_magnitude(values_N, 1) if values_N.size else 0.0
        return Moments(
            total=float(x_N.sum().item()),
            excess=float(over_N.sum().item()),
            squares=float(over_N.square().sum().item()),
            largest=largest,
        )

    @override
    def ternarise(
        self, values_N: Float32s, limit: float, scale: float, key: int
    ) -> NDArray[np.uint8]:
        x_N = self._moved(values_N)
        limits = torch.tensor([limit, scale], dtype=torch.float32, device=self._device)
        codes_N = ternary_codes(x_N, limits[0], limits[1], *scrambled(key))
        return codes_N.cpu().numpy()

    def _moved(self, array: Float32s) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def reaching(x_N: Tensor, tau: float) -> Tensor:
    """A mask of the elements with |x| >= tau, rounded to float32, but no zeros; NaN always."""
    limit = torch.tensor(tau, dtype=torch.float32, device=x_N.device).clamp(min=_SMALLEST)
    return ~(x_N.abs() < limit)


def ternary_codes(
    x_N: Tensor, limit: Tensor, scale: Tensor, low: Tensor | int, high: Tensor | int
) -> Tensor:
    """Codes as of `Ops.ternarise`, uint8; the key is the two halves of it that `scrambled` gives.

    In int64 products wrap around, which leaves the low half right.
    """
    mixed_N = (torch.arange(x_N.numel(), device=x_N.device) * _ODD + low) & _WORD
    mixed_N = ((mixed_N ^ mixed_N >> 16) * _FIRST) & _WORD
    mixed_N = ((mixed_N ^ mixed_N >> 15 ^ high) * _SECOND) & _WORD
    mixed_N = mixed_N ^ mixed_N >> 15
    chance_N = (mixed_N >> 8).float() * 2.0**-24
    fires_N = chance_N * scale < torch.minimum(x_N.abs(), limit)
    return (1 + fires_N * x_N.sign()).to(torch.uint8)


def scrambled(key: int) -> tuple[int, int]:
    """SplitMix64 of a key, in whole numbers: its lower and its upper half."""
    word = (key + _GAMMA) & (2**64 - 1)
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
    word ^= word >> 31
    return word & _WORD, word >> 32
