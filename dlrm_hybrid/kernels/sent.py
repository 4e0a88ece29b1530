"""What is done with elements that were selected, before and after they are sent.

Shapes: N elements of T tensors, K that left them, E = T + 1 places between tensors; U units of
tensors side by side, F = U + 1 places between units.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from dlrm_hybrid.kernels.jit import kernel

Float32s = npt.NDArray[np.float32]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@kernel
def keep_first_ties(
    units_F: Int64s,
    keeps_U: Int64s,
    taus_T: Float32s,
    firsts_E: Int64s,
    bounds_E: Int64s,
    indices_K: Int32s,
    values_K: Float32s,
    residual_N: Float32s,
) -> None:
    """Put elements that equal the threshold back, the last ones, until as many are left as wanted.

    Args:
        units_F: the first tensor of each unit, and the number of tensors.
        keeps_U: elements of each unit that should leave.
        taus_T: thresholds, the same for all tensors of a unit but 0 for those that leave whole:
            nothing of them is put back, and what of them is below the others' does not count.
        firsts_E: where the residual of each tensor begins in `residual_N`, and the end of the last.
        bounds_E: where the elements of each begin among the K, and the end of the last; receives
            the same of those that are left.
        indices_K: positions in their tensors; move up over what is put back.
        values_K: move up too.
        residual_N: of all tensors.
    """
    kept = 0
    first = bounds_E[0]
    for unit in range(keeps_U.size):
        begin, end = units_F[unit], units_F[unit + 1]
        surplus = bounds_E[end] - first - keeps_U[unit]
        equal = 0
        tau = np.float32(0)
        if surplus > 0:
            surplus = -keeps_U[unit]
            for tensor in range(begin, end):
                tau = max(tau, taus_T[tensor])
            for tensor in range(begin, end):
                low = first if tensor == begin else bounds_E[tensor]
                for k in range(low, bounds_E[tensor + 1]):
                    surplus += abs(values_K[k]) >= tau
                    equal += abs(values_K[k]) == tau
        stay = equal - surplus
        for tensor in range(begin, end):
            last = bounds_E[tensor + 1]
            for k in range(first, last):
                index, value = indices_K[k], values_K[k]
                indices_K[kept] = index
                values_K[kept] = value
                if surplus > 0 and abs(value) == tau:
                    if stay > 0 or taus_T[tensor] < tau:
                        kept += 1
                    else:
                        residual_N[firsts_E[tensor] + index] = value
                    stay -= 1
                else:
                    kept += 1
            bounds_E[tensor + 1] = kept
            first = last


@kernel
def clear_sent(firsts_E: Int64s, bounds_E: Int64s, indices_K: Int32s, values_N: Float32s) -> None:
    """Set elements of `values_N`, laid out like the residuals, to 0; see `keep_first_ties`."""
    for tensor in range(bounds_E.size - 1):
        for k in range(bounds_E[tensor], bounds_E[tensor + 1]):
            values_N[firsts_E[tensor] + indices_K[k]] = np.float32(0)
