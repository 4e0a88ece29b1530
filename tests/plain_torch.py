"""The kernels that compressors compute with, in plain torch: the oracle of tests.

Each follows its definition and nothing else. Selections equal those of the kernels; sums may differ
in the last bits of float64.

Shapes: N elements of T tensors, K selected, B rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_float

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.kernels import magnitudes, residual, ternary
from dlrm_hybrid.kernels.magnitudes import Moments, RowSelection

Float32s = NDArray[np.float32]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

SMALLEST = 1e-45  # as a threshold it keeps just the zeros out
WORD, GAMMA = 0xFFFFFFFF, 0x9E3779B97F4A7C15


def accumulate_select(
    gradients_T: NDArray[np.uint64],
    taus_T: Float32s,
    offsets_E: Int64s,
    residual_N: Float32s,
    splits_E: Int64s,
    local_K: Int32s,
    values_K: Float32s,
) -> int:
    at, offsets = 0, offsets_E.tolist()
    splits_E[0] = 0
    for tensor, address in enumerate(gradients_T.tolist()):
        own_N = residual_N[offsets[tensor] : offsets[tensor + 1]]
        x_N = torch.from_numpy(own_N)
        if address:
            gradient_N = np.ctypeslib.as_array((c_float * own_N.size).from_address(address))
            x_N = x_N + torch.from_numpy(gradient_N)
        if not x_N.isfinite().all():
            return tensor
        leaves_N = _reaches(x_N, float(taus_T[tensor]))
        own_K = leaves_N.nonzero().view(-1)
        end = at + own_K.numel()
        local_K[at:end] = own_K.int().numpy()
        values_K[at:end] = x_N[own_K].numpy()
        own_N[:] = x_N.masked_fill(leaves_N, 0).numpy()
        splits_E[tensor + 1] = at = end
    return -1


def reaching(values_N: Float32s, tau: float) -> Int32s:
    return _reaches(torch.from_numpy(values_N), tau).nonzero().view(-1).int().numpy()


def kth_magnitude(values_N: Float32s, k: int) -> float:
    bits_N = torch.from_numpy(values_N).view(torch.int32) & 0x7FFFFFFF  # NaN above infinity
    kth = bits_N.kthvalue(values_N.size - k + 1).values
    return float(kth.view(torch.float32).item())


def largest_of_rows(x_BN: Float32s, k: int) -> RowSelection | None:
    x = torch.from_numpy(x_BN)
    if not x.isfinite().all():
        return None
    tau_B1 = x.abs().kthvalue(x.shape[1] - k + 1, dim=1, keepdim=True).values
    indices_K = ((x.abs() >= tau_B1) & (x != 0)).view(-1).nonzero().view(-1)
    values_K = x.view(-1)[indices_K]
    return RowSelection(indices_K.int().numpy(), values_K.numpy(), tau_B1.view(-1).numpy())


def moments(values_N: Float32s, shift: float) -> Moments:
    x_N = torch.from_numpy(values_N).double()
    over_N = x_N.abs() - shift
    return Moments(
        total=float(x_N.sum().item()),
        excess=float(over_N.sum().item()),
        squares=float(over_N.square().sum().item()),
        largest=kth_magnitude(values_N, 1) if values_N.size else 0.0,
    )


def ternarise(
    values_N: Float32s, limit: float, scale: float, key: int, codes_N: NDArray[np.uint8]
) -> None:
    limit_scale, (low, high) = torch.tensor([limit, scale], dtype=torch.float32), _scrambled(key)
    x_N = torch.from_numpy(values_N)
    # In int64 products wrap around, which leaves the low half right.
    mixed_N = (torch.arange(x_N.numel()) * 0x9E3779B9 + low) & WORD
    mixed_N = ((mixed_N ^ mixed_N >> 16) * 0x21F0AAAD) & WORD
    mixed_N = ((mixed_N ^ mixed_N >> 15 ^ high) * 0xD35A2D97) & WORD
    chance_N = ((mixed_N ^ mixed_N >> 15) >> 8).float() * 2.0**-24
    fires_N = chance_N * limit_scale[1] < torch.minimum(x_N.abs(), limit_scale[0])
    codes_N[:] = (1 + fires_N * x_N.sign()).to(torch.uint8).numpy()


@contextmanager
def in_plain_torch() -> Iterator[None]:
    """Compressors compute with these functions in place of the kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residual, "accumulate_select", accumulate_select)
        patch.setattr(ternary, "ternarise", ternarise)
        for one in (reaching, kth_magnitude, largest_of_rows, moments):
            patch.setattr(magnitudes, one.__name__, one)
        yield


def _reaches(x_N: Tensor, tau: float) -> Tensor:
    """A mask of the elements with |x| >= tau, rounded to float32, but no zeros; NaN always."""
    limit = torch.tensor(tau, dtype=torch.float32).clamp(min=SMALLEST)
    return ~(x_N.abs() < limit)


def _scrambled(key: int) -> tuple[int, int]:
    """SplitMix64 of a key, in whole numbers: its lower and its upper half."""
    word = (key + GAMMA) & (2**64 - 1)
    word = ((word ^ word >> 30) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
    word = ((word ^ word >> 27) * 0x94D049BB133111EB) & (2**64 - 1)
    word ^= word >> 31
    return word & WORD, word >> 32
