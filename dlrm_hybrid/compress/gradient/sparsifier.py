"""Gradients above a threshold leave, the rest waits in a residual (DCT, algorithm 1: DCT-DP).

Shapes: T tensors of N elements in all, K that leave, E = T + 1 places between which tensors lie.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.address import address_of
from dlrm_hybrid.compress.gradient.aim import Aim
from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.drain import Drain, DrainMode
from dlrm_hybrid.compress.gradient.lifespan import LifeSpan
from dlrm_hybrid.compress.gradient.tensor_states import TensorStates
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule
from dlrm_hybrid.kernels.scatter import give_back
from dlrm_hybrid.kernels.select import select_all
from dlrm_hybrid.kernels.sent import clear_sent, keep_first_ties
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse_all
from dlrm_hybrid.wire.values import narrow

Float32s = NDArray[np.float32]
Int64s = NDArray[np.int64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SparsifierOptions:
    """What leaves, how often that is reconsidered, and in which form it travels.

    Attributes:
        aim: how many should.
        rule: finds thresholds.
        lifespan: says when.
        dtype: of the values sent: FLOAT32, BFLOAT16 or FLOAT16.
        drain: empties residuals.
        scale: factor of the gradient before it joins the residual, by step: the learning rate,
            where the server does not multiply by it; None for 1.
    """

    aim: Aim
    rule: ThresholdRule
    lifespan: LifeSpan
    dtype: Dtype
    drain: Drain
    scale: Callable[[int], float] | None


@final
class Sparsifier:
    """A residual for each tensor, and a threshold for each or for all of them.

    Exact zeros never leave. What rounding to `dtype` takes from a value goes back to the residual.
    A tensor whose gradients have all been zero has no threshold yet.

    Args:
        specs: the tensors; each has float32 elements.
        options: the same for all tensors.
    """

    def __init__(self, specs: Sequence[Spec], options: SparsifierOptions) -> None:
        self.specs: Sequence[Spec] = tuple(specs)
        self._options = options
        units = options.aim.units(len(specs))
        counts = [sum(specs[place].count for place in unit) for unit in units]
        last = options.aim.warmup_steps * len(options.aim.warmup_sparsities)
        self._states = TensorStates(
            self.specs,
            options.lifespan,
            units=units,
            keeps=options.aim.keeps(counts, last),
            memories=[options.rule.slots() for _ in specs],
        )
        self._units_F = np.array([*(unit.start for unit in units), len(specs)], np.int64)
        self._bounds_E = np.zeros(len(specs) + 1, np.int64)
        self._sparsity = options.aim.sparsity
        elements = self._states.residual_N.size
        self._indices_N = np.empty(elements, np.int32)
        self._values_N = np.empty(elements, np.float32)
        self._scaled = [torch.empty(spec.shape) for spec in specs if options.scale is not None]

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """Sections of what leaves, in memory of their own."""
        states = self._states
        self._warm_up(step)
        given = self._given(gradients, step)
        addresses = [address_of(gradient) for gradient in given]
        flushed = self._drain(step)
        # In a warm-up all of a tensor may leave that has no threshold yet.
        taus = [0.0 if math.isnan(tau) else tau for tau in states.taus_T.tolist()]
        renewed: dict[int, float] = {}
        for number in states.over(step):
            renewed[number] = self._renewed(number, given)
            for place in states.units[number]:
                addresses[place], taus[place] = 0, renewed[number]
        for place in flushed:
            taus[place] = 0.0
        bounds_E = self._select(addresses, taus, step)
        counts = _sizes(bounds_E)
        for number, tau in renewed.items():
            # Nothing but zeros tells nothing: a threshold of 0 from there would send all that
            # comes later.
            if tau > 0 or any(counts[place] > 0 for place in states.units[number]):
                states.renew(number, tau)
        states.serve(counts, flushed)
        sections = self._sections(bounds_E)
        states.count_step(_sizes(bounds_E))
        return {spec.name: section for spec, section in zip(self.specs, sections, strict=True)}

    def clear_sent(self, values_N: Float32s) -> None:
        """Set to 0 what left at the last step, in memory laid out like the residuals."""
        clear_sent(self._states.firsts_E, self._bounds_E, self._indices_N, values_N)

    def tensors(self) -> dict[str, Tensor]:
        """Residuals "<tensor>.residual" of the tensor's shape, and small tensors beside them."""
        return self._states.tensors()

    def report(self) -> dict[str, TensorReport]:
        """By tensor; counts what left by drains too."""
        return self._states.report()

    def _given(self, gradients: Mapping[str, Tensor], step: int) -> list[Tensor]:
        """What is to join the residuals: memory that a kernel may read by its address."""
        given = [gradients[spec.name] for spec in self.specs]
        for spec, gradient, count in zip(self.specs, given, self._states.counts, strict=True):
            is_flat = gradient.dtype is torch.float32 and gradient.is_contiguous()
            if not is_flat or gradient.numel() != count:
                raise ValueError(f"the gradient of {spec.name} is not {count} float32 in a row")
        if self._options.scale is None:
            return given
        factor = float(np.float32(self._options.scale(step)))
        pairs = zip(given, self._scaled, strict=True)
        return [torch.mul(gradient, factor, out=scaled) for gradient, scaled in pairs]

    def _drain(self, step: int) -> list[int]:
        """Empty the residuals that are due; gives those of which all must leave."""
        drain = self._options.drain
        if drain.mode is DrainMode.NONE:
            return []
        due = [place for place, spec in enumerate(self.specs) if drain.due(spec.name, step)]
        self._states.drains_T[due] += 1
        if drain.mode is DrainMode.FLUSH:
            return due
        for place in due:
            self._states.discard(place)
        return []

    def _warm_up(self, step: int) -> None:
        """Aim at what the step should send."""
        aim = self._options.aim
        if aim.warmup_steps and self._sparsity != aim.sparsity_at(step):
            self._sparsity = aim.sparsity_at(step)
            self._states.keeps = aim.keeps(self._states.unit_counts, step)

    def _renewed(self, number: int, given: Sequence[Tensor]) -> float:
        """Add a unit's gradients to its residuals, and the threshold that is found there."""
        states = self._states
        unit = states.units[number]
        # Sums that overflow are found by the selection; numpy need not warn of them.
        with np.errstate(over="ignore", invalid="ignore"):
            for place in unit:
                residual_N = states.residuals[place]
                np.add(residual_N, given[place].numpy().reshape(-1), out=residual_N)
            keep, memory = states.keeps[number], states.memories[unit.start]
            return self._options.rule.tau(states.unit_residuals[number], keep, memory)

    def _select(self, addresses: Sequence[int], taus: Sequence[float], step: int) -> Int64s:
        """Move what leaves the residuals to the buffers; gives the bounds of each tensor there."""
        states, bounds_E = self._states, self._bounds_E
        taus_T = np.array(taus, np.float32)
        fault = select_all(
            np.array(addresses, np.uint64),
            taus_T,
            states.firsts_E,
            states.residual_N,
            bounds_E,
            self._indices_N,
            self._values_N,
        )
        if fault >= 0:
            raise DivergedError(
                f"step {step + 1}: the gradient of {self.specs[fault].name} is not finite; "
                "optimizer.lr or embedding.lr may be too high"
            )
        if not self._options.aim.sends_ties:
            keep_first_ties(
                self._units_F,
                np.array(states.keeps, np.int64),
                taus_T,
                states.firsts_E,
                bounds_E,
                self._indices_N,
                self._values_N,
                states.residual_N,
            )
        return bounds_E

    def _sections(self, bounds_E: Int64s) -> list[Section]:
        """What was selected, rounded; the residuals keep what that takes away."""
        states, dtype = self._states, self._options.dtype
        indices_K, values_K = self._indices_N[: bounds_E[-1]], self._values_N[: bounds_E[-1]]
        if dtype is not Dtype.FLOAT32:
            rounds = dtype is Dtype.BFLOAT16
            rounded_K = np.empty_like(values_K) if rounds else narrow(values_K, dtype)
            give_back(
                *(states.firsts_E, bounds_E, indices_K, values_K, rounded_K),
                *(states.residual_N, rounds),
            )
            indices_K, values_K = indices_K[: bounds_E[-1]], rounded_K[: bounds_E[-1]]
        return sparse_all(
            [spec.id for spec in self.specs], states.counts_T, bounds_E, indices_K, values_K, dtype
        )


def _sizes(bounds_E: Int64s) -> list[int]:
    """How much lies between one place and the next."""
    return [last - first for first, last in pairwise(bounds_E.tolist())]
