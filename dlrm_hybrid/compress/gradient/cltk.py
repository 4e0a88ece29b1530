"""CLT-k: the leader of a step chooses elements by its own residual, and all trainers send these.

The leader changes with every step (Chen et al., ScaleCom, NeurIPS 2020, algorithm 1). All trainers
send the same k elements, so a pull is as sparse as a push, however many trainers there are.

Shapes: N elements of all tensors of a stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.coordination import Sections
from dlrm_hybrid.compress.gradient.largest import largest
from dlrm_hybrid.compress.gradient.residuals import Residuals
from dlrm_hybrid.compress.gradient.thresholds.rule import keep_count
from dlrm_hybrid.wire.index_set import index_set, only_index_set_of
from dlrm_hybrid.wire.section import Dtype, Section


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CltKOptions:
    """What leaves, and in which form it travels.

    Attributes:
        sparsity: part of the elements of the stage that stays, 0 to 1.
        dtype: of the values sent: FLOAT32, BFLOAT16 or FLOAT16.
        low_pass: part of what is new that joins the residual in a step, above 0, at most 1: with
            less than 1 noise of single steps is damped, and what is sent is more than what leaves.
        trainer: number of this one.
        trainers: how many there are.
    """

    sparsity: float
    dtype: Dtype
    low_pass: float
    trainer: int
    trainers: int


@final
@dataclass(frozen=True, slots=True)
class CltKCoordination:
    """One round, in which the leader speaks and all others listen."""

    rounds: int = 1

    def combine(
        self, number: int, step: int, proposals: Sequence[Sections], count: int
    ) -> Sections:
        """What the leader proposes; raises SectionError if that is no set of elements."""
        chosen = proposals[step % len(proposals)]
        only_index_set_of(chosen, count)
        return chosen


@final
class CltK:
    """A residual for each tensor, and one choice for all of them.

    Args:
        specs: of the tensors of a stage; each has float32 elements.
        options: of the method.
    """

    def __init__(self, specs: Sequence[Spec], options: CltKOptions) -> None:
        self._options = options
        self._residuals = Residuals(specs, options.dtype)
        self._keep = keep_count(self._residuals.residual_N.size, options.sparsity)
        self._before_N = np.zeros(0, np.float32)
        self._agreed_K = np.zeros(0, np.int32)

    @property
    def specs(self) -> Sequence[Spec]:
        """The tensors it was made for."""
        return self._residuals.specs

    @property
    def rounds(self) -> int:
        """One."""
        return 1

    def propose(self, number: int, gradients: Mapping[str, Tensor], step: int) -> Sections:
        """The largest elements if this trainer leads in this step, else nothing."""
        residual_N = self._residuals.residual_N
        if self._options.low_pass < 1:
            self._before_N = residual_N.copy()
        self._residuals.add(gradients, step)
        if step % self._options.trainers != self._options.trainer:
            return ()
        return (index_set(largest(residual_N, self._keep), residual_N.size),)

    def agree(self, number: int, agreed: Sections) -> None:
        """Take the leader's choice."""
        self._agreed_K = only_index_set_of(agreed, self._residuals.residual_N.size)

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """Sections of the elements agreed on, in memory of their own."""
        sections = self._residuals.take(self._agreed_K)
        low_pass, residual_N = np.float32(self._options.low_pass), self._residuals.residual_N
        if low_pass < 1:
            residual_N -= self._before_N
            residual_N *= low_pass
            residual_N += self._before_N
        return sections

    def tensors(self) -> dict[str, Tensor]:
        """Residuals "<tensor>.residual" of the tensor's shape."""
        return self._residuals.tensors()

    def report(self) -> dict[str, TensorReport]:
        """By tensor."""
        return self._residuals.report()
