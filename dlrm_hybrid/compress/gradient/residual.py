"""Residual plus gradient of a step, added where and when a selector looks.

A selector that knows its thresholds adds, selects and removes in one pass over memory; one that
needs the values themselves adds first.

Shapes: N elements of T tensors, K of them selected, E = T + 1 offsets; F groups' offsets, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, final

import numpy as np
from torch import Tensor

from dlrm_hybrid.arrays import Float32s, Float64s, Int32s, Int64s
from dlrm_hybrid.compress.gradient.fragments import choose, norms_of
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.host import not_finite
from dlrm_hybrid.kernels import residual
from dlrm_hybrid.types import DivergedError

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.thresholded import Thresholds, ThresholdSelector


@final
@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """Limits a selection to k elements of each group of adjacent tensors: of ties, the first.

    Attributes:
        groups_F: int64, the first tensor of each group, then T.
        ks_G: int64.
    """

    groups_F: Int64s
    ks_G: Int64s


@final
class Residual:
    """The sum of residual and gradient, from which a selection is taken.

    Attributes:
        layout: as given.
        residual_N: float32; what is not sent.
        flushed: tensors of which everything is to be sent in this step.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.residual_N: Float32s = np.zeros(layout.size, np.float32)
        self.residuals = layout.parts(self.residual_N)
        self.flushed: Sequence[int] = ()
        self._joining: list[Tensor | None] = []  # None where the residual holds it
        self._step = 0
        self._is_finite = False
        self._reached: Indices | None = None
        self._local_N = np.empty(layout.size, np.int32)
        self._reached_N = np.empty(layout.size, np.float32)

    def begin(self, gradients: Sequence[Tensor | None], step: int, flushed: Sequence[int]) -> None:
        """Take the gradients of a step; their memory must last until `take`.

        Args:
            gradients: of all tensors, float32, contiguous, on the CPU; None where nothing joins.
            step: counted from 0, for messages.
            flushed: tensors of which everything is to be sent.
        """
        self._joining = [*gradients]
        self._step, self.flushed = step, flushed
        self._is_finite = False
        self._reached = None

    def of(self, tensors: range) -> Float32s:
        """The sums of adjacent tensors, which need not be finite; a view, float32."""
        self.restore()
        # Sums that overflow are found later; numpy need not warn of them.
        with np.errstate(over="ignore", invalid="ignore"):
            for tensor in tensors:
                gradient, self._joining[tensor] = self._joining[tensor], None
                if gradient is not None:
                    residual_N = self.residuals[tensor]
                    np.add(residual_N, gradient.numpy().reshape(-1), out=residual_N)
        if len(tensors) == 1:
            return self.residuals[tensors.start]
        offsets_E = self.layout.offsets
        return self.residual_N[offsets_E[tensors.start] : offsets_E[tensors.stop]]

    @property
    def values(self) -> Float32s:
        """All sums, float32 (N), a view; raises DivergedError if one is not finite."""
        self.require_finite()
        return self.residual_N

    def norms(self, fragments: Sequence[slice]) -> Float64s:
        """The L2 norms of parts; see `Accumulated`."""
        return norms_of(self.values, fragments)

    def largest(self, quotas: Sequence[tuple[slice, int]]) -> list[Int32s]:
        """The k largest of each part; see `Accumulated`."""
        return choose(self.values, quotas)

    def meeting(self, selector: ThresholdSelector, state: Thresholds, step: int) -> Indices:
        """The elements that meet thresholds; see `Accumulated`."""
        return selector.choose(self, state, step)

    def reaching(self, taus_T: Float32s, limits: Limits | None) -> Indices:
        """Select the elements whose magnitude reaches their tensor's threshold, but no zeros.

        They are removed in the same pass, so that `take` of just these costs nothing.

        Args:
            taus_T: float32, thresholds of 0 or more.
            limits: of elements for each group; None to select all that equal a threshold.

        Raises:
            DivergedError: a sum is not finite; names step and tensor.
        """
        self.restore()
        offsets_E = self.layout.offsets
        splits_E = np.empty_like(offsets_E)
        # To make arrays of gradients takes longer than to select from them.
        addresses = [0 if gradient is None else gradient.data_ptr() for gradient in self._joining]
        fault = residual.accumulate_select(
            *(np.array(addresses, np.uint64), taus_T, offsets_E, self.residual_N),
            *(splits_E, self._local_N, self._reached_N),
        )
        if fault >= 0:
            raise self._diverged(fault)
        self._joining = [None] * len(self._joining)
        self._is_finite = True
        if limits is not None:
            splits_E = self._put_back_ties(limits, taus_T, splits_E)
        self._reached = Indices(self.layout, splits_E, self._local_N[: splits_E[-1]])
        return self._reached

    def values_at(self, indices: Indices) -> Float32s:
        """The sums at some elements, which are kept; a view where `reaching` found just these."""
        if indices is self._reached:
            return self._reached_N[: indices.local_K.size]
        return self.values[indices.flat]

    def take(self, indices: Indices) -> Float32s:
        """Remove elements from the residual, and return their values, valid until the next step.

        Raises:
            DivergedError: as `values`.
        """
        if indices is self._reached:
            self._reached = None
            return self._reached_N[: indices.local_K.size]
        values_N, flat_K = self.values, indices.flat
        values_K = values_N[flat_K]
        values_N[flat_K] = 0
        return values_K

    def restore(self) -> None:
        """Put back what `reaching` removed and `take` did not."""
        reached, self._reached = self._reached, None
        if reached is not None:
            self.residual_N[reached.flat] = self._reached_N[: reached.local_K.size]

    def _put_back_ties(self, limits: Limits, taus_T: Float32s, splits_E: Int64s) -> Int64s:
        """Put what equals the threshold back, the last ones, where more than k were removed.

        Nothing of a flushed tensor is put back, and what of it is below the threshold of the others
        does not count.
        """
        splits, values_N, dropped = splits_E.tolist(), self._reached_N, list[Int64s]()
        groups = zip(pairwise(limits.groups_F.tolist()), limits.ks_G.tolist(), strict=True)
        for (begin, end), k in groups:
            first, last = splits[begin], splits[end]
            if last - first > k:
                tau = taus_T[begin:end].max()
                sizes_K = np.abs(values_N[first:last])
                ties_K = first + np.flatnonzero(sizes_K == tau)
                surplus = int(np.count_nonzero(sizes_K >= tau)) - k
                if surplus > 0:
                    ties_K = ties_K[max(0, ties_K.size - surplus) :]
                    own_taus_K = np.repeat(taus_T, np.diff(splits_E))
                    dropped.append(ties_K[own_taus_K[ties_K] == tau])
        if not any(ties_K.size for ties_K in dropped):
            return splits_E
        dropped_K = np.concatenate(dropped)
        back = Indices(self.layout, splits_E, self._local_N[: splits[-1]]).flat[dropped_K]
        self.residual_N[back] = values_N[dropped_K]
        for array_N in (self._local_N, values_N):
            array_N[: splits[-1] - dropped_K.size] = np.delete(array_N[: splits[-1]], dropped_K)
        return splits_E - np.searchsorted(dropped_K, splits_E)

    def require_finite(self) -> None:
        """Look whether all sums are finite; see `Accumulated`."""
        self.of(range(len(self.layout.specs)))
        if self._is_finite:
            return
        # An element that is not finite makes the sum so; finite ones only near the limit.
        with np.errstate(over="ignore", invalid="ignore"):
            if not math.isfinite(float(self.residual_N.sum())):
                for tensor, residual_N in enumerate(self.residuals):
                    if not np.isfinite(residual_N).all():
                        raise self._diverged(tensor)
        self._is_finite = True

    def _diverged(self, tensor: int) -> DivergedError:
        return not_finite(self._step, self.layout.specs[tensor].name)
