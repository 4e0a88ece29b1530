"""DEFT: every trainer selects from its own fragments of the stage, and all send what all selected.

A leader, another trainer in each step, says by the norms of its own residual how many elements are
sent of each fragment, and who selects from which; then everyone selects the largest of its
fragments. So nothing is selected twice, a pull is as sparse as a push, and selecting takes each
trainer a part of the time (D. Yoon, S. Oh, DEFT, ICPP 2023, algorithms 1 to 5).

Shapes: N elements of all tensors of a stage, L fragments, K elements that are sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

from dlrm_hybrid.compress.gradient.accumulated import Accumulated
from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections, counts_of
from dlrm_hybrid.compress.gradient.deft_plan import (
    Fragments,
    allocate,
    costs,
    exact_budget,
    paper_budget,
)
from dlrm_hybrid.compress.gradient.layout import Float32s, Indices, Int32s, Int64s, Layout
from dlrm_hybrid.compress.gradient.selector import Selection, Stateless, largest
from dlrm_hybrid.kernels.moments import sums
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.index_set import index_set, only_index_set_of
from dlrm_hybrid.wire.section import Encoding, SectionError

Float64s = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Deft:
    """A selection from some fragments, and the union of all trainers'.

    Attributes:
        fragments: of the flat vector.
        k: how many elements should be sent of all.
        is_exact: the leader's numbers hold for all, and their sum is k; else every trainer takes
            those of its own norms, and the sum is only about k.
        trainer: number of this one.
        trainers: how many there are.
    """

    fragments: Fragments
    k: int
    is_exact: bool
    trainer: int
    trainers: int

    @property
    def rounds(self) -> tuple[Op, ...]:
        """The leader speaks, then all have selected."""
        return (Op.LEADER, Op.UNION)

    def init(self, layout: Layout) -> Stateless:
        """Nothing."""
        return Stateless()

    def select(self, x: Accumulated, state: Stateless, step: int) -> Selection:
        """What the owners of all fragments select."""
        values_N, leader = x.values, step % self.trainers
        plan = self._plan(values_N, leader) if leader == self.trainer else ()
        own = self._assigned(values_N, (yield Collective(Op.LEADER, plan)))
        chosen = choose(values_N, own)
        contribution = index_set(np.concatenate([np.zeros(0, np.int32), *chosen]), values_N.size)
        agreed = yield Collective(Op.UNION, (contribution,))
        agreed_K = only_index_set_of(agreed, values_N.size)
        ends = np.array([(part.start, part.stop) for part, _ in own], np.int32).reshape(-1, 2)
        counts = np.diff(np.searchsorted(agreed_K, ends)).ravel()
        if counts.tolist() != [chosen_K.size for chosen_K in chosen]:
            raise _fault(f"others chose from the fragments of trainer {self.trainer}")
        return Indices.of_flat(x.layout, agreed_K)

    def _ks(self, values_N: Float32s) -> Int64s:
        budget = exact_budget if self.is_exact else paper_budget
        return budget(norms_of(values_N, self.fragments), self.fragments.sizes_L, self.k)

    def _plan(self, values_N: Float32s, leader: int) -> Sections:
        """Who selects from each fragment and, where that is for the leader to say, how many."""
        ks_L = self._ks(values_N)
        bins_L = allocate(costs(self.fragments.sizes_L, ks_L), self.trainers)
        # Trainer i takes the bin (leader + i) mod trainers.
        owners_L = (bins_L - leader) % self.trainers
        lists = (owners_L, ks_L) if self.is_exact else (owners_L,)
        return tuple(dense(0, numbers_L.astype(np.int32)) for numbers_L in lists)

    def _assigned(self, values_N: Float32s, plan: Sections) -> list[tuple[slice, int]]:
        """The fragments of this trainer, and how many elements to select from each."""
        sizes_L = self.fragments.sizes_L
        if len(plan) != 1 + self.is_exact:
            raise _fault(f"{len(plan)} sections are no allocation")
        lists = counts_of(plan)
        if any(numbers_L.size != sizes_L.size for numbers_L in lists):
            raise _fault(f"an allocation of other than {sizes_L.size} fragments")
        ks_L = lists[1] if self.is_exact else self._ks(values_N)
        if lists[0].max(initial=0) >= self.trainers or (ks_L > sizes_L).any():
            raise _fault("an allocation to nobody, or of more than there is")
        slices = self.fragments.slices()
        places = np.flatnonzero(lists[0] == self.trainer).tolist()
        return [(slices[place], int(ks_L[place])) for place in places]


def norms_of(values_N: Float32s, fragments: Fragments) -> Float64s:
    """L2 norms of the fragments of a vector."""
    squares = [sums(values_N[one])[1] for one in fragments.slices()]
    return np.array([math.sqrt(square) for square in squares])


def choose(values_N: Float32s, own: Sequence[tuple[slice, int]]) -> list[Int32s]:
    """Indices of the largest elements of each fragment, as many as it says, increasing."""
    return [largest(values_N[fragment], k) + np.int32(fragment.start) for fragment, k in own]


def _fault(reason: str) -> SectionError:
    return SectionError(0, Encoding.DENSE, reason)
