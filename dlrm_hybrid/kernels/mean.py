"""The mean of several trainers' gradients, summed in one order, in one pass over memory.

A block of every gradient is added, divided and looked at while it is in the first cache.

Shapes: T tensors of N elements in all, which lie between E = T + 1 places; X trainers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import carray

from dlrm_hybrid.kernels.bits import floats_at
from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]
Addresses = npt.NDArray[np.uint64]

_BLOCK = 2048
_LARGEST = np.float32(3.4028235e38)


@kernel
def _add(gradient_N: Float32s, sum_N: Float32s, is_first: bool) -> None:
    if is_first:
        for place in range(sum_N.size):
            sum_N[place] = gradient_N[place]
    else:
        for place in range(sum_N.size):
            sum_N[place] += gradient_N[place]


@kernel
def _divide(sum_N: Float32s, trainers: int) -> int:
    """Divide in place; how many elements are then not finite."""
    divisor = np.float32(trainers)
    if trainers & (trainers - 1) == 0:  # the same bits in a fraction of the time
        factor = np.float32(1) / divisor
        for place in range(sum_N.size):
            sum_N[place] *= factor
    else:
        for place in range(sum_N.size):
            sum_N[place] = np.divide(sum_N[place], divisor)
    not_finite = 0
    for place in range(sum_N.size):
        not_finite += not abs(sum_N[place]) <= _LARGEST
    return not_finite


@kernel
def mean_of_all(gradients_XT: Addresses, firsts_E: Int64s, mean_N: Float32s) -> bool:
    """mean = ((g0 + g1) + g2 …) / X; whether all of it is finite.

    Args:
        gradients_XT: addresses of contiguous float32.
        firsts_E: where each tensor begins in `mean_N`, and the end of the last.
        mean_N: of all tensors.
    """
    trainers, tensors = gradients_XT.shape
    not_finite = 0
    for tensor in range(tensors):
        size = firsts_E[tensor + 1] - firsts_E[tensor]
        own_N = mean_N[firsts_E[tensor] : firsts_E[tensor + 1]]
        for first in range(0, size, _BLOCK):
            block_N = own_N[first : first + _BLOCK]
            for trainer in range(trainers):
                gradient_N = carray(floats_at(gradients_XT[trainer, tensor]), size)
                _add(gradient_N[first : first + _BLOCK], block_N, trainer == 0)
            not_finite += _divide(block_N, trainers)
    return not_finite == 0
