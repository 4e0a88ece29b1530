"""The largest elements of the rows of a matrix on a device, and its elements at given positions.

In torch's own operations, whose results are those of `kernels.magnitudes`. Only what was selected
leaves the device.

Shapes: B rows, N columns, M = B N; K elements, R places for them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.compress.host import fetched
from dlrm_hybrid.kernels.magnitudes import RowSelection


def largest_of_rows(x_BN: Tensor, k: int) -> RowSelection | None:
    """As `magnitudes.largest_of_rows`; waits once, and once more where many are equal."""
    x_M = x_BN.detach().reshape(-1)
    size_BN = x_BN.detach().abs()
    tau_B = size_BN.topk(k, dim=1).values[:, -1]
    mask_M = ((size_BN >= tau_B.unsqueeze(1)) & (size_BN > 0)).view(-1)
    ends_M = mask_M.cumsum(0, dtype=torch.int32)
    facts_2 = torch.stack([ends_M[-1], x_M.isfinite().all().int()])
    room = min(x_M.numel(), tau_B.numel() * k)
    while True:
        words = [facts_2, tau_B.view(torch.int32), *_listed(x_M, mask_M, ends_M, room)]
        (host,) = fetched([torch.cat(words)])
        numbers = host.numpy()
        count, is_finite = numbers[:2].tolist()
        if not is_finite:
            return None
        if count <= room:
            break
        room = count
    tau_B, indices_R, values_R = np.split(numbers[2:], [tau_B.numel(), tau_B.numel() + room])
    floats = (array.view(np.float32) for array in (values_R[:count], tau_B))
    return RowSelection(indices_R[:count].copy(), *floats)


def _listed(x_M: Tensor, mask_M: Tensor, ends_M: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Positions and bits of what the mask keeps, int32 (R); of a known size, so nobody waits."""
    place_M = (
        torch.where(mask_M, ends_M - 1, room).clamp_(max=room).long()
    )  # the last place is for all else
    index_M = torch.arange(x_M.numel(), dtype=torch.int32, device=x_M.device)
    columns = (index_M, x_M.view(torch.int32))
    indices_R, values_R = (x.new_empty(room + 1).scatter_(0, place_M, x)[:room] for x in columns)
    return indices_R, values_R


def elements_at(x_BN: Tensor, indices_K: Int32s) -> Float32s:
    """The elements at flat positions; waits once."""
    positions_K = torch.from_numpy(indices_K).to(x_BN.device, non_blocking=True)
    (values_K,) = fetched([x_BN.detach().reshape(-1).index_select(0, positions_K)])
    return values_K.numpy()
