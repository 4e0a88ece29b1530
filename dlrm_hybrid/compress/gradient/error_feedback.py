"""Error feedback: what a step does not send waits in a residual and is sent later.

Gradients go through transforms and join the residual; a selector says which elements of the sum are
sent; these are rounded to the type on the wire, and what rounding takes returns to the residual. So
what a receiver decodes plus the new residual is what joined plus the old residual, bit for bit.

Shapes: N elements of T tensors, K of them sent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s
from dlrm_hybrid.compress.gradient.collective import Op
from dlrm_hybrid.compress.gradient.compressor import Compressor, Encoding, Selected, Sent
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.gradient.methods.thresholded import DrainMode
from dlrm_hybrid.compress.gradient.residual import Residual
from dlrm_hybrid.compress.gradient.selector import Selector
from dlrm_hybrid.compress.gradient.transforms import Gradients, Transform
from dlrm_hybrid.compress.host import require_host
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.kernels.levels.rounding import round_to_levels
from dlrm_hybrid.kernels.residual import return_rounding_error
from dlrm_hybrid.rng import fold
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import Destination, Elements


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Empties residuals at random steps (DCT, Gupta et al., KDD 2021, section 3.3).

    Stale mass may gather in a residual; the paper empties it about once in a million steps. Whether
    one is drained at a step does not depend on what came before.

    Attributes:
        mode: "discard" forgets the residual before the gradient joins it; "flush" sends residual
            and gradient in full.
        every: steps between two drains of a tensor, on average.
        seed: of the run.
        trainer: whose residuals these are; each draws its own steps.
    """

    mode: DrainMode
    every: int
    seed: int
    trainer: int

    def is_due(self, name: str, step: int) -> bool:
        """Whether the residual of a tensor is drained at this step: with probability 1/every."""
        if self.mode == "none":
            return False
        return fold(self.seed, "drain", self.trainer, name, step) % self.every == 0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FeedbackOptions:
    """What `ErrorFeedback` does to gradients besides selecting.

    Attributes:
        dtype: of the values sent: FLOAT32, BFLOAT16 or FLOAT16.
        transforms: of the gradients, in this order.
        low_pass: fraction of what is new that joins the residual in a step, above 0, at most 1:
            below 1 noise of single steps is damped, and more is sent than the residual loses
            (ScaleCom, NeurIPS 2020).
        drain: empties residuals; None for a method that has no such ledger.
        levels: values are integer multiples of a quantum of their tensor; `dtype` is BFLOAT16, in
            which they are exact.
    """

    dtype: Dtype
    transforms: Sequence[Transform] = ()
    low_pass: float = 1.0
    drain: Drain | None = None
    levels: bool = False


@final
class ErrorFeedback(Compressor):
    """Sends selected elements of gradient plus residual, and keeps the others for later steps.

    Attributes:
        layout, selector, options: as given.
        selected: the state of the selector.
    """

    def __init__(self, layout: Layout, selector: Selector, options: FeedbackOptions) -> None:
        self.layout = layout
        self.selector = selector
        self.options = options
        self._low_pass = np.float32(options.low_pass)
        self._damps = bool(self._low_pass < 1)
        self._x = Residual(layout)
        self.selected = selector.init(layout)
        self._transforms = [(transform, transform.init(layout)) for transform in options.transforms]
        self._scaled: Sequence[Tensor] = ()
        self._drains_T = np.zeros(len(layout.specs), np.int64)
        self._discarded_T2 = np.zeros((len(layout.specs), 2))  # sum, then the L2 norms of all
        self._start_report()

    @property
    @override
    def rounds(self) -> tuple[Op, ...]:
        return self.selector.rounds

    @property
    @override
    def sends_levels(self) -> bool:
        return self.options.levels

    @override
    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        x = self._x
        joining = self._joining(gradients, step)
        flushed = self._drain(step)
        before_N = x.residual_N.copy() if self._damps else x.residual_N
        x.begin(joining, step, flushed)
        try:
            indices = yield from self.selector.select(x, self.selected, step)
        except GeneratorExit:  # a round has failed elsewhere: nothing is sent
            x.restore()
            self._damp(before_N)
            raise
        indices, rounded_K = self._rounded(indices)
        self._damp(before_N)
        for transform, state in self._transforms:
            transform.sent(indices, state)
        self._steps += 1
        self._sent_T += indices.counts
        elements = Elements(indices.splits_E, indices.local_K, rounded_K)
        return Selected(self.layout, elements, self.options.dtype)

    @override
    def take_back(self, sent: Sent) -> None:
        offsets_E, indices_K, values_K = sent.elements()
        # What was sent did not lose its damped part, so it comes back damped.
        returning = Elements(offsets_E, indices_K, values_K * self._low_pass)
        returning.add_to(Destination(self._x.residuals))

    def _damp(self, before_N: Float32s) -> None:
        """Keep only a part of what the residual has gained since `before_N`."""
        if self._damps:
            residual_N = self._x.residual_N
            residual_N -= before_N
            residual_N *= self._low_pass
            residual_N += before_N

    @override
    def flush(self) -> dict[str, Tensor]:
        residual_N = self._x.residual_N.copy()
        self._x.residual_N[:] = 0
        parts = zip(self.layout.specs, self.layout.parts(residual_N), strict=True)
        return {spec.name: torch.from_numpy(part).view(spec.shape) for spec, part in parts}

    @override
    def tensors(self) -> dict[str, Tensor]:
        views = self.layout.tensors(self._x.residual_N, "residual") | self.selected.tensors()
        if self.options.drain is not None:
            for tensor, spec in enumerate(self.layout.specs):
                drains_1 = self._drains_T[tensor : tensor + 1]
                views[f"{spec.name}.drains"] = torch.from_numpy(drains_1)
                views[f"{spec.name}.discarded"] = torch.from_numpy(self._discarded_T2[tensor])
        for _, state in self._transforms:
            views |= state.tensors()
        return views

    @override
    def report(self) -> dict[str, SentReport]:
        reports = [
            SentReport(elements=self._steps * spec.count, sent=sent)
            for spec, sent in zip(self.layout.specs, self._sent_T.tolist(), strict=True)
        ]
        self._start_report()
        return dict(zip(self.layout.names, self.selected.report(reports), strict=True))

    def _joining(self, gradients: Mapping[str, Tensor], step: int) -> Sequence[Tensor]:
        """The transformed gradients, which are to join the residuals."""
        grads = [gradients[name] for name in self.layout.names]
        for gradient, spec, count in zip(grads, self.layout.specs, self.layout.counts, strict=True):
            require_host(gradient, "gradient", spec.name)
            if gradient.numel() != count:
                raise ValueError(f"gradient {spec.name}: {gradient.numel()} elements, not {count}")
        if not self._transforms:
            return grads
        joining = Gradients(grads, 1.0)
        for transform, state in self._transforms:
            joining = transform.update(joining, state, step)
        if joining.factor == 1.0:
            return joining.tensors
        if not self._scaled:
            self._scaled = self.layout.room()
        factor = float(np.float32(joining.factor))
        pairs = zip(joining.tensors, self._scaled, strict=True)
        return [torch.mul(tensor, factor, out=scaled) for tensor, scaled in pairs]

    def _drain(self, step: int) -> list[int]:
        """Empty the residuals that are due; returns the tensors that must be sent in full."""
        drain = self.options.drain
        if drain is None or drain.mode == "none":
            return []
        due = [
            tensor for tensor, spec in enumerate(self.layout.specs) if drain.is_due(spec.name, step)
        ]
        self._drains_T[due] += 1
        if drain.mode == "flush":
            return due
        for tensor in due:
            residual_N = self._x.residuals[tensor]
            wide_N = residual_N.astype(np.float64)
            self._discarded_T2[tensor] += (wide_N.sum(), np.linalg.norm(wide_N))
            residual_N[:] = 0
        return []

    def _rounded(self, indices: Indices) -> tuple[Indices, Float32s]:
        """Round what is sent; the residual keeps the difference.

        What rounds to zero is sent only where trainers have agreed on it; as a level never, for
        the residual keeps all of it.
        """
        x, dtype, levels = self._x, self.options.dtype, self.options.levels
        values_K = x.take(indices)
        if dtype is Dtype.FLOAT32:
            return indices, values_K
        if self.rounds and not levels:
            rounded_K = narrow(values_K, dtype)
            x.residual_N[indices.flat] = values_K - rounded_K
            return indices, rounded_K
        rounds = dtype is Dtype.BFLOAT16 and not levels
        rounded_K = narrow(values_K, dtype) if dtype is Dtype.FLOAT16 else np.empty_like(values_K)
        if levels:
            round_to_levels(indices.splits_E, values_K, rounded_K)  # all are finite
        splits_E, local_K = indices.splits_E, indices.local_K
        return_rounding_error(
            *(self.layout.offsets, splits_E, local_K, values_K, rounded_K),
            *(x.residual_N, rounds),
        )
        nonzero = Indices(self.layout, splits_E, local_K[: splits_E[-1]])
        return nonzero, rounded_K[: splits_E[-1]]

    def _start_report(self) -> None:
        self._steps = 0
        self._sent_T = np.zeros(len(self.layout.specs), np.int64)
