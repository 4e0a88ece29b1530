"""The operations of `ops` in plain torch: for devices without Triton, and the oracle of the tests.

Each follows its definition and nothing else, tensor by tensor.

Shapes: as in `ops`; N elements of one tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.device.ops import (
    BROKEN,
    OVERFLOWN,
    USED,
    DeviceOps,
    Excesses,
    Marks,
    Moments,
    Ranks,
)
from dlrm_hybrid.compress.device.sums import Blocks, Sums
from dlrm_hybrid.rng import splitmix64

_MAGNITUDE = 0x7FFFFFFF


@final
class PlainOps(DeviceOps):
    """The operations in plain torch, for the tensors of some blocks."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks

    @override
    def of(self, blocks: Blocks) -> PlainOps:
        return PlainOps(blocks)

    @override
    def inspect(self, x: Sums) -> None:
        for tensor, gradient in enumerate(x.gradients):
            flag = BROKEN * (~gradient.isfinite()).any() | USED * gradient.any()
            x.flags_E[tensor] = flag
            x.flags_E[-1] |= flag & BROKEN

    @override
    def moments(self, x: Sums) -> Moments:
        wide = [residual.double() for residual in _joined(x)]
        return Moments(
            total=torch.stack([w.sum() for w in wide]),
            excess=torch.stack([w.abs().sum() for w in wide]),
            squares=torch.stack([w.square().sum() for w in wide]),
            largest=torch.stack([w.abs().max() if w.numel() else w.sum() for w in wide]),
            nonzero=torch.stack([w.count_nonzero() for w in wide]),
        )

    @override
    def excesses(self, x: Sums, taus_TJ: Tensor, active_T: Tensor) -> Excesses:
        totals, squares = torch.zeros_like(taus_TJ), torch.zeros_like(taus_TJ)
        counts = torch.zeros_like(taus_TJ, dtype=torch.int64)
        for tensor, residual in enumerate(_joined(x)):
            for j, tau in enumerate(taus_TJ[tensor]):
                over = residual.abs()[residual.abs() > tau.float()].double() - tau
                totals[tensor, j], squares[tensor, j] = over.sum(), over.square().sum()
                counts[tensor, j] = over.numel()
        return Excesses(totals, squares, counts)

    @override
    def looks(self, x: Sums, taus_TJ: Tensor, active_T: Tensor) -> Tensor:
        rows = [
            reaching(residual[None], taus[:, None]).sum(1)
            for residual, taus in zip(_joined(x), taus_TJ, strict=True)
        ]
        return torch.stack(rows)

    @override
    def kth(self, x: Sums, ranks: Ranks, active_T: Tensor) -> Tensor:
        taus_T = torch.zeros_like(ranks.ks_T, dtype=torch.float32)
        for tensor, (residual, k) in enumerate(zip(_joined(x), ranks.ks, strict=True)):
            if residual.numel():
                kth = _bits(residual).kthvalue(residual.numel() - k + 1).values
                taus_T[tensor] = kth.view(torch.float32)
        return taus_T

    @override
    def draw(self, x: Sums, sample: Sums, seeds_T: Tensor) -> None:
        seeds = cast("list[int]", seeds_T.tolist())
        for residual, target, seed in zip(_joined(x), sample.residuals, seeds, strict=True):
            count, drawn = residual.numel(), target.numel()
            starts = torch.arange(drawn + 1) * count // max(drawn, 1)
            draws = torch.from_numpy(splitmix64(seed, drawn) % starts.diff().numpy().astype("u8"))
            target.copy_(residual[(starts[:-1] + draws.long()).to(residual.device)])

    @override
    def mark(self, x: Sums, taus_T: Tensor, targets: Sequence[Tensor], targets_T: Tensor) -> Marks:
        masks = [torch.zeros(0, dtype=torch.bool, device=self._blocks.device)]
        rows = zip(_joined(x), targets, taus_T, strict=True)
        for tensor, (residual, target, tau) in enumerate(rows):
            mask = reaching(residual, tau) & (x.fault == 0)
            flag = OVERFLOWN * (~residual.isfinite()).any()
            target.view(-1).copy_(
                residual.where(mask, torch.where(x.fault == 0, 0.0, target.view(-1)))
            )
            residual.masked_fill_(mask, 0.0)
            masks.append(mask)
            x.flags_E[tensor] |= flag
        x.flags_E[-1:] |= x.flags_E[:-1].amax(0, keepdim=True) & OVERFLOWN
        counts_T = torch.stack([mask.sum() for mask in masks])  # of the first, which has none, 0
        splits_E = counts_T.cumsum(0)
        return Marks(torch.cat(masks), splits_E, splits_E)

    @override
    def compact(
        self, marks: Marks, room: int, sources: Sequence[Tensor], sources_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        flat = [source.view(-1) for source in sources]
        flat_N, indices_K = torch.cat(flat), marks.bits.nonzero().view(-1)[:room]
        values_K = flat_N[indices_K]
        flat_N[indices_K] = 0
        parts: tuple[Tensor, ...] = torch.split(flat_N, self._blocks.counts)
        for target, cleared in zip(flat, parts, strict=True):
            target.copy_(cleared)
        filling = (0, room - indices_K.numel())
        pad = torch.nn.functional.pad
        return pad(indices_K.int(), filling), pad(values_K, filling)

    @override
    def scatter(
        self, indices_K: Tensor, values_K: Tensor, targets: Sequence[Tensor], addresses_T: Tensor
    ) -> None:
        splits = cast(
            "list[int]",
            torch.searchsorted(indices_K.long(), self._blocks.offsets_E).tolist(),
        )
        for tensor, target in enumerate(targets):
            span = slice(splits[tensor], splits[tensor + 1])
            local = indices_K[span].long() - self._blocks.offsets_E[tensor]
            target.view(-1).index_add_(0, local, values_K[span])

    @override
    def blend(self, x: Sums, momenta_N: Tensor, momentum: float, ahead_N: Tensor | None) -> None:
        if x.fault.item():
            return
        momenta = self._blocks.parts(momenta_N)
        aheads = momenta if ahead_N is None else self._blocks.parts(ahead_N)
        for u, ahead, gradient in zip(momenta, aheads, x.gradients, strict=True):
            if ahead_N is None:
                u.mul_(momentum).add_(gradient.view(-1))
            else:
                u.add_(gradient.view(-1)).mul_(momentum)
                torch.add(u, gradient.view(-1), out=ahead)


def _joined(x: Sums) -> Sequence[Tensor]:
    """The residuals, after the gradients have joined them; they do not where one is broken."""
    if x.join():
        for residual, gradient in zip(x.residuals, x.gradients, strict=True):
            residual.copy_(torch.where(x.fault != 0, residual, residual + gradient.view(-1)))
    return x.residuals


def _bits(x_N: Tensor) -> Tensor:
    """Magnitudes as int32, which order alike; NaN above infinity."""
    return x_N.view(torch.int32) & _MAGNITUDE


def reaching(x_N: Tensor, tau: Tensor) -> Tensor:
    """Which magnitudes reach a threshold, but no zeros; NaN does always."""
    return _bits(x_N) >= _bits(tau).clamp(min=1)
