"""Gradients above a threshold leave, the rest waits in a residual (DCT, algorithm 1: DCT-DP).

Shapes: N elements of a tensor, K of them that leave, T tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.drain import Drain, DrainMode
from dlrm_hybrid.compress.gradient.lifespan import LifeSpan
from dlrm_hybrid.compress.gradient.tensor_state import TensorState
from dlrm_hybrid.compress.gradient.thresholds.rule import ThresholdRule, keep_count
from dlrm_hybrid.kernels.scatter import give_back
from dlrm_hybrid.kernels.select import accumulate_select, select
from dlrm_hybrid.types import DivergedError
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import sparse
from dlrm_hybrid.wire.values import narrow

Float32s = NDArray[np.float32]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SparsifierOptions:
    """What leaves, how often that is reconsidered, and in which form it travels.

    Attributes:
        sparsity: part of the elements of each tensor that stays, 0 to 1.
        rule: finds thresholds.
        lifespan: says when.
        dtype: of the values sent: FLOAT32, BFLOAT16 or FLOAT16.
        drain: empties residuals.
        scale: factor of the gradient before it joins the residual, by step: the learning rate,
            where the server does not multiply by it; None for 1.
    """

    sparsity: float
    rule: ThresholdRule
    lifespan: LifeSpan
    dtype: Dtype
    drain: Drain
    scale: Callable[[int], float] | None


@final
class Sparsifier:
    """A residual and a threshold for each tensor.

    Exact zeros never leave. What rounding to `dtype` takes from a value goes back to the residual.
    A tensor whose gradients have all been zero has no threshold yet.

    Args:
        specs: the tensors; each has float32 elements.
        options: the same for all tensors.
    """

    def __init__(self, specs: Sequence[Spec], options: SparsifierOptions) -> None:
        self.specs: Sequence[Spec] = tuple(specs)
        self._options = options
        self._states = [
            TensorState(
                spec,
                keep=keep_count(spec.count, options.sparsity),
                offset=options.lifespan.offset(place, len(specs)),
                memory=options.rule.slots(),
            )
            for place, spec in enumerate(specs)
        ]
        largest = max((spec.count for spec in specs), default=0)
        self._indices_N = np.empty(largest, np.int32)
        self._values_N = np.empty(largest, np.float32)
        self._scaled_N = np.empty(0 if options.scale is None else largest, np.float32)

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """Sections of what leaves, in memory of their own."""
        # Sums that overflow are found by the selection; numpy need not warn of them.
        with np.errstate(over="ignore", invalid="ignore"):
            return {
                state.spec.name: self._encode(state, gradients[state.spec.name], step)
                for state in self._states
            }

    def tensors(self) -> dict[str, Tensor]:
        """Residuals "<tensor>.residual" of the tensor's shape, and small tensors beside them."""
        return {name: view for state in self._states for name, view in state.tensors().items()}

    def report(self) -> dict[str, TensorReport]:
        """By tensor; counts what left by drains too."""
        return {state.spec.name: state.report() for state in self._states}

    def _encode(self, state: TensorState, gradient: Tensor, step: int) -> Section:
        gradient_N = self._scaled(gradient.numpy().reshape(-1), step)
        count = self._select(state, gradient_N, step)
        if count < 0:
            raise DivergedError(
                f"step {step + 1}: the gradient of {state.spec.name} is not finite; "
                "optimizer.lr may be too high"
            )
        indices_K, values_K = self._rounded(state.residual_N, count)
        state.count_step(indices_K.size)
        return sparse(state.spec.id, state.spec.count, indices_K, values_K, self._options.dtype)

    def _scaled(self, gradient_N: Float32s, step: int) -> Float32s:
        if self._options.scale is None:
            return gradient_N
        factor = np.float32(self._options.scale(step))
        return np.multiply(gradient_N, factor, out=self._scaled_N[: gradient_N.size])

    def _select(self, state: TensorState, gradient_N: Float32s, step: int) -> int:
        """Add the gradient to the residual and move what leaves to the buffers; -1 as select."""
        residual_N, outputs = state.residual_N, (self._indices_N, self._values_N)
        drain = self._options.drain
        if drain.due(state.spec.name, step):
            state.drains[0] += 1
            if drain.mode is DrainMode.FLUSH:
                return accumulate_select(gradient_N, residual_N, 0.0, *outputs)
            state.discard()
        if state.is_over(self._options.lifespan, step):
            np.add(residual_N, gradient_N, out=residual_N)
            tau = self._options.rule.tau(residual_N, state.keep, state.memory)
            count = select(residual_N, tau, *outputs)
            # Nothing but zeros tells nothing: a threshold of 0 from there would send all that
            # comes later.
            if tau > 0 or count > 0:
                state.renew(tau)
        else:
            count = accumulate_select(gradient_N, residual_N, state.tau, *outputs)
        state.serve(count)
        return count

    def _rounded(self, residual_N: Float32s, count: int) -> tuple[NDArray[np.int32], Float32s]:
        """Indices and values to send, rounded; the residual keeps what that takes away."""
        indices_K, values_K = self._indices_N[:count], self._values_N[:count]
        if self._options.dtype is Dtype.FLOAT32:
            # A section of all elements views them, and the next tensor needs the buffer.
            return indices_K, values_K.copy() if count == residual_N.size else values_K
        narrowed_K = narrow(values_K, self._options.dtype)
        if give_back(indices_K, values_K, narrowed_K, residual_N) < count:
            sent_K = np.flatnonzero(narrowed_K)
            return indices_K[sent_K], narrowed_K[sent_K]
        return indices_K, narrowed_K
