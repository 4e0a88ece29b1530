"""The six primitives of compression as one protocol, and their implementation for the CPU.

`compress.torch_ops` implements them in plain torch operations: for any device, and as what tests
compare the kernels with.

Shapes: N elements of T tensors, K selected, E = T + 1 offsets; B rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt
from numba import carray
from typing_extensions import override

from dlrm_hybrid.kernels import magnitudes, ternary
from dlrm_hybrid.kernels.bits import (
    BLOCK,
    SMALLEST,
    add_mask64_ge,
    floats_at,
    mask64_ge,
    nearest_bfloat16,
    trailing_zeros,
)
from dlrm_hybrid.kernels.jit import kernel

if TYPE_CHECKING:
    from torch import Tensor

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]
Addresses = npt.NDArray[np.uint64]


class Selected(NamedTuple):
    """Elements of several tensors, with room for all.

    Attributes:
        splits_E: int64, where the elements of each tensor begin among the K, then K.
        local_N: int32, their indices in their tensors, increasing in each.
        values_N: float32.
    """

    splits_E: Int64s
    local_N: Int32s
    values_N: Float32s


class RowSelection(NamedTuple):
    """The largest elements of every row.

    Attributes:
        indices_K: int32, flat, increasing.
        values_K: float32, none of them 0.
        tau_B: float32, the thresholds.
    """

    indices_K: Int32s
    values_K: Float32s
    tau_B: Float32s


class Moments(NamedTuple):
    """Of some values, their sums in float64.

    Attributes:
        total: sum of the values.
        excess: sum of the magnitudes less a shift.
        squares: sum of the squares of that; not finite if a value is not.
        largest: magnitude.
    """

    total: float
    excess: float
    squares: float
    largest: float


class Ops(Protocol):
    """What sparsifiers and quantisers compute with. All arrays are contiguous."""

    def accumulate_select(
        self,
        gradients: Sequence[Tensor | None],
        residual_N: Float32s,
        taus_T: Float32s,
        offsets_E: Int64s,
        selected: Selected,
    ) -> int:
        """residual += gradient; then elements with |x| >= tau, but no zeros, leave the residual.

        Args:
            gradients: float32 of each tensor, on the CPU; None where the residual holds it.
            residual_N: of all tensors; 0 where an element leaves.
            taus_T: at least 0.
            offsets_E: of the tensors in `residual_N`.
            selected: receives what left.

        Returns:
            the first tensor with a sum that is not finite, or -1. If there is one, residual and
            selection are of no use.
        """
        ...

    def compact(self, values_N: Float32s, tau: float) -> Int32s:
        """Increasing indices of the elements with |x| >= tau in float32, but no zeros.

        NaN reaches every threshold.
        """
        ...

    def kth_magnitude(self, values_N: Float32s, k: int) -> float:
        """The magnitude that k elements reach, 1 to N; NaN is larger than infinity."""
        ...

    def topk_rows(self, x_BN: Float32s, k: int) -> RowSelection | None:
        """The elements of every row that reach its k-th largest magnitude, but no zeros.

        All that tie with it are selected. None if a value is not finite.
        """
        ...

    def moments(self, values_N: Float32s, shift: float = 0.0) -> Moments:
        """Sums of the values, and of their magnitudes less `shift`."""
        ...

    def ternarise(self, values_N: Float32s, limit: float, scale: float, key: int) -> Bytes:
        """Codes 0, 1 and 2 for -1, 0 and 1: drawn so that their mean times `scale` is the value.

        Args:
            values_N: finite.
            limit: magnitude at which values are clipped.
            scale: at least every clipped magnitude.
            key: of the draws, 63 bits.
        """
        ...


@final
class NumbaOps(Ops):
    """Compiled kernels on the CPU."""

    @override
    def accumulate_select(
        self,
        gradients: Sequence[Tensor | None],
        residual_N: Float32s,
        taus_T: Float32s,
        offsets_E: Int64s,
        selected: Selected,
    ) -> int:
        # To make arrays of gradients takes longer than to select from them.
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in gradients]
        addresses_T = np.array(addresses, np.uint64)
        return accumulate_select(addresses_T, taus_T, offsets_E, residual_N, *selected)

    @override
    def compact(self, values_N: Float32s, tau: float) -> Int32s:
        indices_N = np.empty(values_N.size, np.int32)
        return indices_N[: magnitudes.compact(values_N, tau, indices_N)].copy()

    @override
    def kth_magnitude(self, values_N: Float32s, k: int) -> float:
        return magnitudes.kth_magnitude(values_N, k)

    @override
    def topk_rows(self, x_BN: Float32s, k: int) -> RowSelection | None:
        indices_N, values_N = np.empty(x_BN.size, np.int32), np.empty(x_BN.size, np.float32)
        tau_B = np.empty(x_BN.shape[0], np.float32)
        kept = magnitudes.topk_rows(x_BN, k, indices_N, values_N, tau_B)
        if kept < 0:
            return None
        return RowSelection(indices_N[:kept].copy(), values_N[:kept], tau_B)

    @override
    def moments(self, values_N: Float32s, shift: float = 0.0) -> Moments:
        return Moments(*magnitudes.moments(values_N, shift))

    @override
    def ternarise(self, values_N: Float32s, limit: float, scale: float, key: int) -> Bytes:
        codes_N = np.empty(values_N.size, np.uint8)
        ternary.ternarise(values_N, limit, scale, key, codes_N)
        return codes_N


NUMBA = NumbaOps()


@kernel
def _accumulate_select(
    gradient_N: Float32s,
    adds: bool,
    residual_N: Float32s,
    tau: np.float32,
    local_K: Int32s,
    values_K: Float32s,
) -> int:
    """Of one tensor: how many left, or -1 if a sum is not finite.

    64 elements make one mask of comparisons; only the bits set in it cost more. The comparison lets
    NaN and infinity through whatever the threshold, so that looking at what leaves is enough to
    notice every value that is not finite.
    """
    limit = max(tau, SMALLEST)
    kept = 0
    finite = True
    blocks = residual_N.size // BLOCK * BLOCK
    for first in range(0, blocks, BLOCK):
        if adds:
            mask = add_mask64_ge(gradient_N, residual_N, first, limit)
        else:
            mask = mask64_ge(residual_N, first, limit)
        while mask != np.uint64(0):
            index = first + trailing_zeros(mask)
            value = residual_N[index]
            finite &= np.isfinite(value)
            local_K[kept] = index
            values_K[kept] = value
            residual_N[index] = np.float32(0)
            kept += 1
            mask &= mask - np.uint64(1)
    for index in range(blocks, residual_N.size):
        value = residual_N[index]
        if adds:
            value += gradient_N[index]
        finite &= np.isfinite(value)
        leaves = abs(value) >= limit
        local_K[kept] = index
        values_K[kept] = value
        residual_N[index] = np.float32(0) if leaves else value
        kept += leaves
    return kept if finite else -1


@kernel
def accumulate_select(
    gradients_T: Addresses,
    taus_T: Float32s,
    offsets_E: Int64s,
    residual_N: Float32s,
    splits_E: Int64s,
    local_K: Int32s,
    values_K: Float32s,
) -> int:
    """`Ops.accumulate_select`; the address of a gradient is 0 where the residual holds it."""
    splits_E[0] = 0
    for tensor in range(taus_T.size):
        first = splits_E[tensor]
        own_N = residual_N[offsets_E[tensor] : offsets_E[tensor + 1]]
        adds = gradients_T[tensor] != 0
        gradient_N = carray(floats_at(gradients_T[tensor]), own_N.size)
        count = _accumulate_select(
            gradient_N, adds, own_N, taus_T[tensor], local_K[first:], values_K[first:]
        )
        if count < 0:
            return tensor
        splits_E[tensor + 1] = first + count
    return -1


@kernel
def return_rounding_error(
    offsets_E: Int64s,
    splits_E: Int64s,
    local_K: Int32s,
    values_K: Float32s,
    rounded_K: Float32s,
    residual_N: Float32s,
    rounds: bool,
) -> None:
    """Overwrite elements of residuals with what rounding took, and drop what became zero.

    Args:
        offsets_E: of the tensors in `residual_N`.
        splits_E: where the elements of each begin among the K; receives the same of those left.
        local_K: indices in their tensors; move up over what is dropped.
        values_K: before rounding.
        rounded_K: after it; move up too.
        residual_N: of all tensors.
        rounds: to bfloat16, which `rounded_K` receives; else the caller has done it.
    """
    if rounds:
        words_K, rounded_words_K = values_K.view(np.uint32), rounded_K.view(np.uint32)
        for k in range(words_K.size):
            rounded_words_K[k] = nearest_bfloat16(words_K[k])
    kept = 0
    first = splits_E[0]
    for tensor in range(splits_E.size - 1):
        last = splits_E[tensor + 1]
        for k in range(first, last):
            rounded = rounded_K[k]
            residual_N[offsets_E[tensor] + local_K[k]] = values_K[k] - rounded
            local_K[kept] = local_K[k]
            rounded_K[kept] = rounded
            kept += rounded != 0
        splits_E[tensor + 1] = kept
        first = last
