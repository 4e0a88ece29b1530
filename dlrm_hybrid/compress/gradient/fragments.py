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
from itertools import accumulate
from typing import final

import numpy as np
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s, Float64s, Int32s, Int64s
from dlrm_hybrid.compress.gradient.collective import (
    Collective,
    Op,
    Sections,
    counts_of,
    round_fault,
)
from dlrm_hybrid.compress.gradient.compressor import Stateless
from dlrm_hybrid.compress.gradient.layout import Indices
from dlrm_hybrid.compress.gradient.selector import Accumulated, Selection, Selector, largest
from dlrm_hybrid.kernels import magnitudes
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.sparse import index_set, index_set_of


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FragmentSelector(Selector):
    """Selects from the fragments given to this trainer, and sends the union of all selections.

    DEFT (D. Yoon, S. Oh, ICPP 2023), algorithm 1.

    Attributes:
        fragments: parts of the flat vector that tile it, see `partition`.
        k: how many elements should be sent of all.
        is_exact: the leader's numbers hold for all, and their sum is k; else every trainer takes
            those of its own norms, and the sum is only about k.
        trainer: number of this trainer.
        trainers: how many there are.
    """

    fragments: Sequence[slice]
    k: int
    is_exact: bool
    trainer: int
    trainers: int

    @property
    @override
    def rounds(self) -> tuple[Op, ...]:
        return (Op.LEADER, Op.UNION)

    @override
    def select(self, x: Accumulated, state: Stateless, step: int) -> Selection:
        leader, count = step % self.trainers, x.layout.size
        plan = self._plan(x, leader) if leader == self.trainer else ()
        quotas = self._assigned(x, (yield Collective(Op.LEADER, plan)))
        chosen = x.largest(quotas)
        contribution = index_set(np.concatenate([np.zeros(0, np.int32), *chosen]), count)
        agreed = yield Collective(Op.UNION, (contribution,))
        agreed_K = index_set_of(agreed, count)
        ends = np.array([(part.start, part.stop) for part, _ in quotas], np.int32).reshape(-1, 2)
        counts = np.diff(np.searchsorted(agreed_K, ends)).ravel()
        if counts.tolist() != [chosen_K.size for chosen_K in chosen]:
            raise round_fault(f"others chose from the fragments of trainer {self.trainer}")
        return Indices.of_flat(x.layout, agreed_K)

    def _ks(self, x: Accumulated) -> Int64s:
        budget = exact_budget if self.is_exact else paper_budget
        return budget(x.norms(self.fragments), sizes_of(self.fragments), self.k)

    def _plan(self, x: Accumulated, leader: int) -> Sections:
        """A leader's plan: who selects from each fragment and, if it is exact, how much."""
        ks_L = self._ks(x)
        bins_L = allocate(costs(sizes_of(self.fragments), ks_L), self.trainers)
        # Trainer i takes the bin (leader + i) mod trainers.
        owners_L = (bins_L - leader) % self.trainers
        lists = (owners_L, ks_L) if self.is_exact else (owners_L,)
        return tuple(dense(0, numbers_L.astype(np.int32)) for numbers_L in lists)

    def _assigned(self, x: Accumulated, plan: Sections) -> list[tuple[slice, int]]:
        """The fragments of this trainer, and how many elements to select from each."""
        sizes_L = sizes_of(self.fragments)
        if len(plan) != 1 + self.is_exact:
            raise round_fault(f"{len(plan)} sections are no allocation")
        lists = counts_of(plan)
        if any(numbers_L.size != sizes_L.size for numbers_L in lists):
            raise round_fault(f"an allocation of other than {sizes_L.size} fragments")
        ks_L = lists[1] if self.is_exact else self._ks(x)
        if lists[0].max(initial=0) >= self.trainers or (ks_L > sizes_L).any():
            raise round_fault("an allocation to an unknown trainer, or of more than there is")
        owned = np.flatnonzero(lists[0] == self.trainer).tolist()
        return [(self.fragments[fragment], int(ks_L[fragment])) for fragment in owned]


def sizes_of(fragments: Sequence[slice]) -> Int64s:
    """The number of elements of each fragment, int64 (L)."""
    return np.array([part.stop - part.start for part in fragments], np.int64)


def norms_of(values_N: Float32s, fragments: Sequence[slice]) -> Float64s:
    """The L2 norms of the fragments of a vector, float64 (L)."""
    squares = [magnitudes.moments(values_N[part], 0.0).squares for part in fragments]
    return np.array([math.sqrt(square) for square in squares])


def choose(values_N: Float32s, quotas: Sequence[tuple[slice, int]]) -> list[Int32s]:
    """Indices of the k largest elements of each fragment, int32, increasing in each."""
    return [largest(values_N[fragment], k) + np.int32(fragment.start) for fragment, k in quotas]


def partition(counts: Sequence[int], trainers: int) -> list[slice]:
    """Cut tensors of more than a trainer's share into as many fragments as there are trainers.

    So no fragment has more elements than ceil(N / trainers) (DEFT, algorithm 2).

    Args:
        counts: elements of each tensor, N in all; those of none are no fragments.
        trainers: at least 1.
    """
    total = sum(counts)
    sizes: list[int] = []
    for count in counts:
        if count * trainers > total:
            part, longer = divmod(count, trainers)
            sizes += [part + 1] * longer + [part] * (trainers - longer)
        else:
            sizes.append(count)
    ends = accumulate(sizes)
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True) if size]


def paper_budget(norms_L: Float64s, sizes_L: Int64s, budget: int) -> Int64s:
    """Elements to send of each fragment, by its norm: at least 1, so not the budget in sum.

    DEFT, algorithm 3, its quotas rounded down as the authors' program does.
    """
    ks_L = np.zeros(sizes_L.size, np.int64)
    rest = budget
    for fragment, norm, norms_left in _descending(norms_L):
        quota = int(rest * norm / norms_left) if norms_left > 0 else 0
        ks_L[fragment] = min(int(sizes_L[fragment]), max(1, quota))
        rest -= int(ks_L[fragment])
    return ks_L


def exact_budget(norms_L: Float64s, sizes_L: Int64s, budget: int) -> Int64s:
    """Elements to send of each fragment, by its norm: the budget in all, none of zero fragments.

    Where there are fewer elements to hand out than fragments, those of the largest norms get one
    each; where all others have been served, what is left goes by descending norms to who has room.
    """
    ks_L = np.zeros(sizes_L.size, np.int64)
    visited = [entry for entry in _descending(norms_L) if entry[1] > 0]
    rest = min(budget, sum(int(sizes_L[fragment]) for fragment, _, _ in visited))
    if rest < len(visited):
        ks_L[[fragment for fragment, _, _ in visited[:rest]]] = 1
        return ks_L
    for number, (fragment, norm, norms_left) in enumerate(visited):
        later = len(visited) - number - 1
        quota = max(1, min(int(rest * norm / norms_left), rest - later))
        ks_L[fragment] = min(int(sizes_L[fragment]), quota)
        rest -= int(ks_L[fragment])
    for fragment, _, _ in visited:
        extra = min(rest, int(sizes_L[fragment] - ks_L[fragment]))
        ks_L[fragment] += extra
        rest -= extra
    return ks_L


def costs(sizes_L: Int64s, ks_L: Int64s) -> Float64s:
    """The cost of selecting from each fragment: size times log2 of k, with k at least 2."""
    of_one_L = np.log2(np.maximum(ks_L, 2).astype(np.float64))
    return np.where(ks_L > 0, sizes_L * of_one_L, 0.0)


def allocate(costs_L: Float64s, bins: int) -> Int64s:
    """Assign fragments to bins: the dearest first, each to the lightest bin (DEFT, algorithm 4).

    Ties by number. The heaviest bin is at most 4/3 of the best possible (Graham, 1969).
    """
    loads = [0.0] * bins
    bins_L = np.zeros(costs_L.size, np.int64)
    for fragment in np.argsort(-costs_L, kind="stable").tolist():
        lightest = loads.index(min(loads))
        bins_L[fragment] = lightest
        loads[lightest] += float(costs_L[fragment])
    return bins_L


def _descending(norms_L: Float64s) -> list[tuple[int, float, float]]:
    """Fragments by norm: index, norm, and the sum of it and all that follow; ties by index."""
    order = np.argsort(-norms_L, kind="stable").tolist()
    sorted_norms = [float(norms_L[fragment]) for fragment in order]
    sums = [math.fsum(sorted_norms[number:]) for number in range(len(order))]
    return list(zip(order, sorted_norms, sums, strict=True))
