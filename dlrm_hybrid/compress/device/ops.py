"""What compressors compute on a device: for all tensors at once, without waiting for the host.

Shapes: T tensors, E = T + 1 offsets, C chunks, F = C + 1; J thresholds for each tensor, K selected
elements, A trainers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from math import sqrt
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor

from dlrm_hybrid.compress.device.sums import Blocks, Sums, sent

BROKEN, USED, OVERFLOWN = 1, 2, 4
STRIDE, SAMPLED = 61, 2**18  # at most so many elements of a tensor are sampled
SAMPLED_FROM = 8192  # elements; below, all of them are counted


class Moments(NamedTuple):
    """Sums over all elements of each tensor; float64 (T) but for the last.

    Attributes:
        total: sum of the values.
        excess: sum of the magnitudes.
        squares: sum of the squares; not finite if a value is not.
        largest: magnitude.
        nonzero: how many are not 0, int64.
    """

    total: Tensor
    excess: Tensor
    squares: Tensor
    largest: Tensor
    nonzero: Tensor


class Excesses(NamedTuple):
    """Sums over the magnitudes of each tensor above each of J thresholds.

    Attributes:
        totals: float64 (T, J), sums of magnitudes less the threshold.
        squares: float64, sums of the squares of that.
        counts: int64, how many there are.
    """

    totals: Tensor
    squares: Tensor
    counts: Tensor


class Marks(NamedTuple):
    """Which elements have left the residual.

    Attributes:
        bits: of all elements, in a form of the implementation's own.
        splits_F: int64, where those of each chunk begin among the K, then K.
        splits_E: likewise of each tensor.
    """

    bits: Tensor
    splits_F: Tensor
    splits_E: Tensor


@final
class Ranks:
    """Ranks of magnitudes from the top, one for each tensor, and how to find a bound for each.

    Args:
        blocks: of the tensors.
        ks: the ranks, 1 to the number of elements; of a tensor without elements any.

    Attributes:
        ks: as given.
        ks_T: int32, the same.
        strides_T: int64, every which element is sampled; 0 for none.
        sample_ranks_T: int32, ranks just below in the sample, whose magnitudes are bounds.
        sampled: of the largest sample.
    """

    def __init__(self, blocks: Blocks, ks: Sequence[int]) -> None:
        self.ks = [*ks]
        plans = [_sampling(*pair) for pair in zip(blocks.counts, ks, strict=True)]
        self.sampled = max((sampled for _, sampled, _ in plans), default=0)
        self.ks_T = sent(self.ks, torch.int32, blocks.device)
        strides, ranks = [plan[0] for plan in plans], [plan[2] for plan in plans]
        self.strides_T = sent(strides, torch.int64, blocks.device)
        self.sample_ranks_T = sent(ranks, torch.int32, blocks.device)


def _sampling(count: int, k: int) -> tuple[int, int, int]:
    """Stride, number and rank of a tensor's sample."""
    stride = max(STRIDE, count // SAMPLED | 1)
    sampled = -(-count // stride)
    expected = k * sampled / max(1, count)
    rank = int(expected + 4 * sqrt(expected) + 4)
    return (stride, sampled, rank) if count >= SAMPLED_FROM and rank <= sampled else (0, 0, 0)


class DeviceOps(Protocol):
    """Operations on all tensors of some blocks. Gradients join `Sums` in the first that looks.

    `active_T` (bool) says of which tensors a result is wanted; of the others it is anything.
    """

    def of(self, blocks: Blocks) -> DeviceOps:
        """The same operations on other tensors."""
        ...

    def inspect(self, x: Sums) -> None:
        """Flag gradients: BROKEN where one is not finite, USED where it is not all zeros."""
        ...

    def moments(self, x: Sums) -> Moments:
        """Sums over all elements."""
        ...

    def excesses(self, x: Sums, taus_TJ: Tensor, active_T: Tensor) -> Excesses:
        """Sums over the magnitudes above thresholds (float64, compared in float32)."""
        ...

    def looks(self, x: Sums, taus_TJ: Tensor, active_T: Tensor) -> Tensor:
        """How many magnitudes reach thresholds (float32), but no zeros; int64 (T, J)."""
        ...

    def kth(self, x: Sums, ranks: Ranks, active_T: Tensor) -> Tensor:
        """The magnitudes of these ranks; float32 (T)."""
        ...

    def draw(self, x: Sums, sample: Sums, seeds_T: Tensor) -> None:
        """Fill a sample with random elements, in order; `thresholds.dgc.sample` draws the same."""
        ...

    def mark(self, x: Sums, taus_T: Tensor, targets: Sequence[Tensor], targets_T: Tensor) -> Marks:
        """Move the elements with |x| >= tau, but no zeros, to the targets, all else of which is 0.

        Nothing happens where a gradient is broken; sums that are not finite are flagged.

        Args:
            x: residuals and gradients, which may be the targets.
            taus_T: float32.
            targets: of all tensors, float32, contiguous.
            targets_T: int64, their addresses.
        """
        ...

    def compact(
        self, marks: Marks, room: int, sources: Sequence[Tensor], sources_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """List the marked elements: int32 indices without padding, and values, `room` places each.

        Args:
            marks: of `mark`.
            room: for so many; further ones stay, and of fewer the last places hold anything.
            sources: the targets of `mark`; what is listed becomes 0.
            sources_T: int64, their addresses.
        """
        ...

    def scatter(
        self, indices_K: Tensor, values_K: Tensor, targets: Sequence[Tensor], addresses_T: Tensor
    ) -> None:
        """Add values to elements of tensors, by indices without padding."""
        ...

    def blend(self, x: Sums, momenta_N: Tensor, momentum: float, ahead_N: Tensor | None) -> None:
        """u = m u + g; or with `ahead_N`, u = m (u + g), and u + g is written to it."""
        ...


def ops_for(blocks: Blocks) -> DeviceOps:
    """The fastest operations that can run: Triton's kernels on CUDA, where it is installed."""
    if blocks.device.type == "cuda" and _has_triton():
        from dlrm_hybrid.compress.device.launches import TritonOps

        return TritonOps(blocks)
    from dlrm_hybrid.compress.device.plain import PlainOps

    return PlainOps(blocks)


@cache
def _has_triton() -> bool:
    installed = find_spec("triton") is not None
    if not installed:
        logging.getLogger("dlrm_hybrid").warning(
            "Triton is not installed: compression on the GPU takes torch's own operations, which "
            "are slower and wait for the device more than once in a step"
        )
    return installed
