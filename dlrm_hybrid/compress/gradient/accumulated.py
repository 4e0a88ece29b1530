"""Residual plus gradient of a step, added where and when a selector looks.

A selector that knows its thresholds adds, selects and removes in one pass over memory; one that
needs the values themselves adds first.

Shapes: N elements of T tensors, K of them selected, E = T + 1 offsets; F groups' offsets, G groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.address import address_of
from dlrm_hybrid.compress.gradient.layout import Float32s, Indices, Int64s, Layout
from dlrm_hybrid.kernels.scatter import put, take
from dlrm_hybrid.kernels.select import select_all
from dlrm_hybrid.kernels.sent import keep_first_ties
from dlrm_hybrid.types import DivergedError

ADDED = 0  # instead of the address of a gradient that the residual already holds


@final
@dataclass(frozen=True, slots=True, eq=False)
class Limits:
    """At most k elements of each group of adjacent tensors: of ties, the first.

    Attributes:
        groups_F: int64, the first tensor of each group, then T.
        ks_G: int64.
    """

    groups_F: Int64s
    ks_G: Int64s


@final
class Accumulated:
    """The sum of residual and gradient, of which a selection is taken.

    Args:
        layout: of the tensors.

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
        self._gradients: Sequence[Tensor] = ()
        self._pending: list[bool] = []
        self._step = 0
        self._is_finite = False
        self._reached: Indices | None = None
        self._local_N = np.empty(layout.size, np.int32)
        self._reached_N = np.empty(layout.size, np.float32)

    def begin(self, gradients: Sequence[Tensor], step: int, flushed: Sequence[int]) -> None:
        """Take the gradients of a step; their memory must last until `take`.

        Args:
            gradients: of all tensors, float32, contiguous.
            step: counted from 0, for messages.
            flushed: tensors of which everything is to be sent.
        """
        self._gradients, self._step, self.flushed = gradients, step, flushed
        self._pending = [True] * len(gradients)
        self._is_finite = False
        self._reached = None

    def of(self, tensors: range) -> Float32s:
        """The values of adjacent tensors, which need not be finite; a view.

        Raises:
            ValueError: a gradient is not contiguous float32 of its tensor's size.
        """
        self._restore()
        # Sums that overflow are found later; numpy need not warn of them.
        with np.errstate(over="ignore", invalid="ignore"):
            for tensor in tensors:
                if self._pending[tensor]:
                    residual_N, gradient = self.residuals[tensor], self._gradients[tensor]
                    self._require_flat(tensor, gradient)
                    np.add(residual_N, gradient.numpy().reshape(-1), out=residual_N)
                    self._pending[tensor] = False
        if len(tensors) == 1:
            return self.residuals[tensors.start]
        offsets_E = self.layout.offsets
        return self.residual_N[offsets_E[tensors.start] : offsets_E[tensors.stop]]

    @property
    def values(self) -> Float32s:
        """All values, a view; raises DivergedError if one is not finite."""
        values_N = self.of(range(len(self.layout.specs)))
        if not self._is_finite:
            self._require_finite()
        return values_N

    def reaching(self, taus_T: Float32s, limits: Limits | None) -> Indices:
        """The elements whose magnitude reaches their tensor's threshold, but no zeros.

        They are removed in the same pass, so that `take` of just these costs nothing.

        Args:
            taus_T: thresholds of 0 or more.
            limits: where not all that equal a threshold count.

        Raises:
            DivergedError: a sum is not finite; names step and tensor.
            ValueError: as `of`.
        """
        self._restore()
        layout, addresses = self.layout, [ADDED] * len(self._gradients)
        for tensor, gradient in enumerate(self._gradients):
            if self._pending[tensor]:
                self._require_flat(tensor, gradient)
                addresses[tensor] = address_of(gradient)
        splits_E = np.empty(layout.offsets.size, np.int64)
        fault = select_all(
            np.array(addresses, np.uint64),
            taus_T,
            layout.offsets,
            self.residual_N,
            splits_E,
            self._local_N,
            self._reached_N,
        )
        if fault >= 0:
            raise self._diverged(fault)
        self._pending = [False] * len(addresses)
        self._is_finite = True
        if limits is not None:
            keep_first_ties(
                limits.groups_F,
                limits.ks_G,
                taus_T,
                layout.offsets,
                splits_E,
                self._local_N,
                self._reached_N,
                self.residual_N,
            )
        self._reached = Indices(layout, splits_E, self._local_N[: splits_E[-1]])
        return self._reached

    def values_at(self, indices: Indices) -> Float32s:
        """The values of some elements, which stay; a view where `reaching` found just these."""
        if indices is self._reached:
            return self._reached_N[: indices.local_K.size]
        return self.values[indices.flat]

    def take(self, indices: Indices) -> Float32s:
        """Remove elements: the residual is 0 there. Their values, valid until the next step.

        Raises:
            DivergedError: as `values`.
        """
        if indices is self._reached:
            self._reached = None
            return self._reached_N[: indices.local_K.size]
        values_N, flat_K = self.values, indices.flat
        taken_K = np.empty(flat_K.size, np.float32)
        take(values_N, flat_K, taken_K)
        return taken_K

    def _restore(self) -> None:
        """Put back what `reaching` removed and nobody took."""
        reached, self._reached = self._reached, None
        if reached is not None:
            put(reached.flat, self._reached_N[: reached.local_K.size], self.residual_N)

    def _require_flat(self, tensor: int, gradient: Tensor) -> None:
        count = self.layout.counts[tensor]
        is_flat = gradient.dtype is torch.float32 and gradient.is_contiguous()
        if not is_flat or gradient.numel() != count:
            name = self.layout.specs[tensor].name
            raise ValueError(f"the gradient of {name} is not {count} contiguous float32")

    def _require_finite(self) -> None:
        # An element that is not finite makes the sum so; finite ones only near the limit.
        with np.errstate(over="ignore", invalid="ignore"):
            if not math.isfinite(float(self.residual_N.sum())):
                for tensor, residual_N in enumerate(self.residuals):
                    if not np.isfinite(residual_N).all():
                        raise self._diverged(tensor)
        self._is_finite = True

    def _diverged(self, tensor: int) -> DivergedError:
        return not_finite(self._step, self.layout.specs[tensor].name)


def not_finite(step: int, name: str) -> DivergedError:
    """That the gradient of a tensor is not finite at a step, counted from 0."""
    return DivergedError(
        f"step {step + 1}: the gradient of {name} is not finite; "
        "optimizer.lr or embedding.lr may be too high"
    )
