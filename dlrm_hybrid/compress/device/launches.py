"""The operations of `ops` as launches of Triton's kernels.

Shapes: as in `kernels.device`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.device.ops import DeviceOps, Excesses, Marks, Moments, Ranks
from dlrm_hybrid.compress.device.sums import Blocks, Sums, is_aligned
from dlrm_hybrid.kernels import device

kernels: Any = device  # Triton's decorator is untyped

_BINS = 2048
_COPIES = 8  # of a histogram, so that fewer atomics go to one address
_SAMPLES = 1024  # of one program
_SELECTED = 1024  # likewise
_STEP = 4096  # chunks whose sums one turn adds up


@final
class TritonOps(DeviceOps):
    """The operations as Triton's kernels, for the tensors of some blocks.

    Args:
        blocks: of the tensors; on CUDA, or anywhere with TRITON_INTERPRET=1.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks, self._tensors = blocks, len(blocks.counts)
        self._grid = (blocks.chunks,)
        self._copies = max(1, min(_COPIES, 256 // max(1, self._tensors)))
        self._bins_RTH = self._zeros(self._copies, self._tensors, _BINS)

    @override
    def of(self, blocks: Blocks) -> TritonOps:
        return TritonOps(blocks)

    @override
    def inspect(self, x: Sums) -> None:
        table, where = self._blocks.table_C4, x.addresses_T
        self._launch(kernels.inspect, x, table, where, x.flags_E, self._tensors)

    @override
    def moments(self, x: Sums) -> Moments:
        sums_3C = self._doubles(3, self._blocks.chunks)
        largest_T, nonzero_T = self._zeros(self._tensors), self._longs(self._tensors)
        self._look(kernels.moments, x, sums_3C, largest_T, nonzero_T, self._blocks.chunks)
        total, excess, squares = self._added_up(sums_3C)
        largest = largest_T.view(torch.float32).double()
        return Moments(total, excess, squares, largest, nonzero_T)

    @override
    def excesses(self, x: Sums, taus_TJ: Tensor, active_T: Tensor) -> Excesses:
        thresholds = taus_TJ.shape[1]
        sums_MC = self._doubles(2 * thresholds, self._blocks.chunks)
        counts_TJ = self._longs(self._tensors, thresholds)
        args = (active_T, taus_TJ.contiguous(), sums_MC, counts_TJ, self._blocks.chunks)
        self._look(kernels.excesses, x, *args, J=thresholds)
        totals_MT = self._added_up(sums_MC)
        return Excesses(totals_MT[0::2].T, totals_MT[1::2].T, counts_TJ)

    @override
    def looks(self, x: Sums, taus_TJ: Tensor, active_T: Tensor) -> Tensor:
        counts_TJ = self._longs(*taus_TJ.shape)
        args = (active_T, taus_TJ.contiguous(), counts_TJ)
        self._look(kernels.looks, x, *args, J=taus_TJ.shape[1])
        return counts_TJ

    @override
    def kth(self, x: Sums, ranks: Ranks, active_T: Tensor) -> Tensor:
        prefix_T, missed_T = self._zeros(self._tensors), self._zeros(self._tensors)
        ranks_T = ranks.ks_T.clone()
        rounds = [(0, active_T), (1, active_T), (2, active_T)]
        if ranks.sampled:
            self._bound(x, ranks, active_T, prefix_T, missed_T)
            # Counts all of a tensor whose bound was too high; as a rule there is none.
            rounds.insert(1, (0, missed_T))
        for level, active in rounds:
            args = (active, prefix_T, self._bins_RTH, self._tensors, self._copies)
            self._look(kernels.histogram, x, *args, LEVEL=level)
            self._find(active, ranks_T, prefix_T, missed_T, level)
        return prefix_T.view(torch.float32)

    def _bound(
        self, x: Sums, ranks: Ranks, active_T: Tensor, prefix_T: Tensor, missed_T: Tensor
    ) -> None:
        blocks = self._blocks
        grid = (-(-ranks.sampled // _SAMPLES), self._tensors)
        kernels.sample[grid](
            *(blocks.sizes_T, blocks.places_T, ranks.strides_T, x.addresses_T, x.residual_N),
            *(x.fault, self._bins_RTH, self._copies),
            ADDS=x.waits,
            SAMPLES=_SAMPLES,
        )
        active_T = active_T & (ranks.strides_T > 0)
        self._find(active_T, ranks.sample_ranks_T, prefix_T, missed_T, -1)

    def _find(
        self, active_T: Tensor, ranks_T: Tensor, prefix_T: Tensor, missed_T: Tensor, level: int
    ) -> None:
        args = (self._bins_RTH, active_T, ranks_T, prefix_T, missed_T)
        kernels.find[self._tensors,](
            *args, self._tensors, COPIES=self._copies, LEVEL=level, num_warps=8
        )

    @override
    def draw(self, x: Sums, sample: Sums, seeds_T: Tensor) -> None:
        blocks, target = self._blocks, sample.blocks
        grid = (-(-max(target.counts, default=0) // _SAMPLES), self._tensors)
        kernels.draw[grid](
            *(blocks.sizes_T, blocks.places_T, target.sizes_T, target.places_T, seeds_T),
            *(x.residual_N, sample.residual_N),
            SAMPLES=_SAMPLES,
        )

    @override
    def mark(self, x: Sums, taus_T: Tensor, targets: Sequence[Tensor], targets_T: Tensor) -> Marks:
        blocks, aligned = self._blocks, x.aligned and is_aligned(targets)
        words_CW = torch.empty(
            (blocks.chunks, blocks.chunk // 32), dtype=torch.int32, device=blocks.device
        )
        counts_C = torch.empty(blocks.chunks, dtype=torch.int64, device=blocks.device)
        if blocks.chunks:
            kernels.mark[self._grid](
                *(blocks.table_C4, x.addresses_T, x.residual_N, x.flags_E, taus_T, targets_T),
                *(words_CW, counts_C, self._tensors),
                ADDS=x.join(),
                ALIGNED=aligned,
                CHUNK=blocks.chunk,
            )
        splits_F = torch.nn.functional.pad(counts_C.cumsum(0), (1, 0))
        return Marks(words_CW, splits_F, splits_F[blocks.firsts_E])

    @override
    def compact(
        self, marks: Marks, room: int, sources: Sequence[Tensor], sources_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        blocks = self._blocks
        indices_K = torch.empty(room, dtype=torch.int32, device=blocks.device)
        values_K = torch.empty(room, dtype=torch.float32, device=blocks.device)
        if blocks.chunks:
            kernels.compact[self._grid](
                *(blocks.table_C4, sources_T, marks.bits, marks.splits_F, blocks.offsets_E),
                *(indices_K, values_K, room),
                CHUNK=blocks.chunk,
            )
        return indices_K, values_K

    @override
    def scatter(
        self, indices_K: Tensor, values_K: Tensor, targets: Sequence[Tensor], addresses_T: Tensor
    ) -> None:
        count = indices_K.numel()
        if count:
            kernels.scatter[-(-count // _SELECTED),](
                *(indices_K, values_K, self._blocks.offsets_E, addresses_T, count, self._tensors),
                BITS=(self._tensors - 1).bit_length(),
                SELECTED=_SELECTED,
            )

    @override
    def blend(self, x: Sums, momenta_N: Tensor, momentum: float, ahead_N: Tensor | None) -> None:
        is_nesterov = ahead_N is not None
        args = (self._blocks.table_C4, x.addresses_T, momenta_N, x.fault, momentum)
        ahead_N = momenta_N if ahead_N is None else ahead_N
        self._launch(
            *(kernels.blend, x, *args, ahead_N), NESTEROV=is_nesterov, enable_fp_fusion=False
        )

    def _look(self, kernel: Any, x: Sums, *args: Any, **constants: Any) -> None:
        """Launch a kernel that looks at the sums; the first of a step adds the gradients."""
        first = (self._blocks.table_C4, x.addresses_T, x.residual_N, x.fault)
        self._launch(kernel, x, *first, *args, ADDS=x.join(), **constants)

    def _launch(self, kernel: Any, x: Sums, *args: Any, **constants: Any) -> None:
        if self._blocks.chunks:
            kernel[self._grid](*args, ALIGNED=x.aligned, CHUNK=self._blocks.chunk, **constants)

    def _added_up(self, sums_MC: Tensor) -> Tensor:
        rows, chunks = sums_MC.shape
        totals_MT = self._doubles(rows, self._tensors)
        grid = (self._tensors, rows)
        kernels.add_up[grid](
            sums_MC, self._blocks.firsts_E, totals_MT, chunks, STEP=_STEP, num_warps=8
        )
        return totals_MT

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._blocks.device)

    def _longs(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=self._blocks.device)

    def _doubles(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float64, device=self._blocks.device)
