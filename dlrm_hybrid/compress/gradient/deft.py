"""DEFT: every trainer selects from its own fragments of the stage, and all send what all selected.

A delegate, another trainer in each step, says by the norms of its own residual how many elements
leave each fragment, and who selects from which; then everyone selects the largest of its fragments.
So nothing is selected twice, a pull is as sparse as a push, and selecting takes each trainer a part
of the time (D. Yoon, S. Oh, DEFT, ICPP 2023, algorithms 1 to 5).

Shapes: N elements of all tensors of a stage, L fragments, K elements that leave.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import Spec, TensorReport
from dlrm_hybrid.compress.gradient.coordination import Sections
from dlrm_hybrid.compress.gradient.deft_plan import (
    Fragments,
    allocate,
    costs,
    exact_budget,
    paper_budget,
    partition,
)
from dlrm_hybrid.compress.gradient.largest import largest
from dlrm_hybrid.compress.gradient.residuals import Residuals
from dlrm_hybrid.compress.gradient.thresholds.rule import keep_count
from dlrm_hybrid.kernels.moments import sums
from dlrm_hybrid.wire.dense import array_of, dense
from dlrm_hybrid.wire.index_set import index_set, only_index_set_of
from dlrm_hybrid.wire.section import Dtype, Encoding, Section, SectionError

Float32s = NDArray[np.float32]
Float64s = NDArray[np.float64]
Int32s = NDArray[np.int32]
Int64s = NDArray[np.int64]

ALLOCATION, SELECTION = range(2)  # rounds


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DeftOptions:
    """What leaves, and in which form it travels.

    Attributes:
        sparsity: part of the elements of the stage that stays, 0 to 1.
        dtype: of the values sent: FLOAT32, BFLOAT16 or FLOAT16.
        is_exact: the delegate's numbers hold for all, and their sum is what should leave; else
            every trainer takes those of its own norms, and the sum is only about that.
        trainer: number of this one.
        trainers: how many there are.
    """

    sparsity: float
    dtype: Dtype
    is_exact: bool
    trainer: int
    trainers: int


@final
@dataclass(frozen=True, slots=True)
class DeftCoordination:
    """Two rounds: the delegate speaks, then every trainer has chosen."""

    rounds: int = 2

    def combine(
        self, number: int, step: int, proposals: Sequence[Sections], count: int
    ) -> Sections:
        """The delegate's allocation; then the union of all choices, which share no element.

        Raises:
            SectionError: a proposal is no allocation, or no choice.
        """
        if number == ALLOCATION:
            allocation = proposals[step % len(proposals)]
            for section in allocation:
                _numbers_of(section)
            return allocation
        chosen_K = np.concatenate([only_index_set_of(proposal, count) for proposal in proposals])
        chosen_K.sort()
        if (np.diff(chosen_K) == 0).any():
            raise _fault("two trainers chose the same element")
        return (index_set(chosen_K, count),)


@final
class Deft:
    """A residual for each tensor, and a choice from some fragments.

    Args:
        specs: of the tensors of a stage; each has float32 elements.
        options: of the method.
    """

    def __init__(self, specs: Sequence[Spec], options: DeftOptions) -> None:
        self._options = options
        self._residuals = Residuals(specs, options.dtype)
        self._keep = keep_count(self._residuals.residual_N.size, options.sparsity)
        self._fragments = partition([spec.count for spec in specs], options.trainers)
        self._own: list[tuple[slice, int]] = []
        self._agreed_K = np.zeros(0, np.int32)

    @property
    def specs(self) -> Sequence[Spec]:
        """The tensors it was made for."""
        return self._residuals.specs

    @property
    def rounds(self) -> int:
        """Two."""
        return 2

    def propose(self, number: int, gradients: Mapping[str, Tensor], step: int) -> Sections:
        """Of the delegate the allocation, of others nothing; then everyone's choice."""
        residual_N = self._residuals.residual_N
        if number == ALLOCATION:
            self._residuals.add(gradients, step)
            delegate = step % self._options.trainers
            return self._allocation(delegate) if delegate == self._options.trainer else ()
        return (index_set(choose(residual_N, self._own), residual_N.size),)

    def agree(self, number: int, agreed: Sections) -> None:
        """Take the fragments of this trainer, or what all have chosen.

        Raises:
            SectionError: it is neither.
        """
        if number == ALLOCATION:
            self._own = self._assigned(agreed)
        else:
            self._agreed_K = only_index_set_of(agreed, self._residuals.residual_N.size)

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """Sections of the elements agreed on, in memory of their own."""
        return self._residuals.take(self._agreed_K)

    def tensors(self) -> dict[str, Tensor]:
        """Residuals "<tensor>.residual" of the tensor's shape."""
        return self._residuals.tensors()

    def report(self) -> dict[str, TensorReport]:
        """By tensor."""
        return self._residuals.report()

    def _keeps(self) -> Int64s:
        norms_L = norms_of(self._residuals.residual_N, self._fragments)
        budget = exact_budget if self._options.is_exact else paper_budget
        return budget(norms_L, self._fragments.sizes_L, self._keep)

    def _allocation(self, delegate: int) -> Sections:
        """Who selects from each fragment and, where that is for the delegate to say, how many."""
        keeps_L, trainers = self._keeps(), self._options.trainers
        bins_L = allocate(costs(self._fragments.sizes_L, keeps_L), trainers)
        # Trainer i takes the bin (delegate + i) mod trainers.
        owners_L = (bins_L - delegate) % trainers
        told = (owners_L, keeps_L) if self._options.is_exact else (owners_L,)
        return tuple(dense(0, numbers_L.astype(np.int32)) for numbers_L in told)

    def _assigned(self, agreed: Sections) -> list[tuple[slice, int]]:
        """The fragments of this trainer, and how many elements leave each."""
        sizes_L, options = self._fragments.sizes_L, self._options
        if len(agreed) != 1 + options.is_exact:
            raise _fault(f"{len(agreed)} sections are no allocation")
        told = [_numbers_of(section) for section in agreed]
        if any(numbers_L.size != sizes_L.size for numbers_L in told):
            raise _fault(f"an allocation of other than {sizes_L.size} fragments")
        keeps_L = told[1] if options.is_exact else self._keeps()
        if told[0].max(initial=0) >= options.trainers or (keeps_L > sizes_L).any():
            raise _fault("an allocation to nobody, or of more than there is")
        slices = self._fragments.slices()
        places = np.flatnonzero(told[0] == options.trainer).tolist()
        return [(slices[place], int(keeps_L[place])) for place in places]


def norms_of(values_N: Float32s, fragments: Fragments) -> Float64s:
    """L2 norms of the fragments of a vector."""
    squares = [sums(values_N[one])[1] for one in fragments.slices()]
    return np.array([math.sqrt(square) for square in squares])


def choose(values_N: Float32s, own: Sequence[tuple[slice, int]]) -> Int32s:
    """Places of the largest elements of some fragments: as many of each as it says, ascending."""
    chosen = [np.zeros(0, np.int32)]
    for part, keep in own:
        chosen.append(largest(values_N[part], keep) + np.int32(part.start))
    return np.concatenate(chosen)


def _numbers_of(section: Section) -> Int32s:
    if section.encoding is not Encoding.DENSE or section.dtype is not Dtype.INT32:
        raise _fault(f"{section.encoding.name} {section.dtype.name.lower()} are no numbers")
    numbers_L: Int32s = array_of(section)
    if (numbers_L < 0).any():
        raise _fault("a number is negative")
    return numbers_L


def _fault(reason: str) -> SectionError:
    return SectionError(0, Encoding.DENSE, reason)
