"""How DEFT divides a vector, its budget and the work among trainers: pure.

Shapes: L fragments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]
Float64s = NDArray[np.float64]


@final
@dataclass(frozen=True, slots=True, eq=False)
class Fragments:
    """Parts of a vector, one behind the other.

    Attributes:
        firsts_L: int64, where each begins.
        sizes_L: int64.
    """

    firsts_L: Int64s
    sizes_L: Int64s

    def slices(self) -> list[slice]:
        """Of the vector."""
        pairs = zip(self.firsts_L.tolist(), self.sizes_L.tolist(), strict=True)
        return [slice(first, first + size) for first, size in pairs]


def partition(counts: Sequence[int], trainers: int) -> Fragments:
    """Each tensor, those of more than a trainer's share in as many parts as there are trainers.

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
    sizes_L = np.array([size for size in sizes if size], np.int64)
    return Fragments(np.cumsum(sizes_L) - sizes_L, sizes_L)


def paper_budget(norms_L: Float64s, sizes_L: Int64s, budget: int) -> Int64s:
    """What leaves each fragment, in proportion to its norm: at least 1, so not the budget in all.

    DEFT, algorithm 3, its quotas rounded down as the authors' program does.
    """
    keeps_L = np.zeros(sizes_L.size, np.int64)
    rest = budget
    for place, norm, norms_left in _descending(norms_L):
        quota = int(rest * norm / norms_left) if norms_left > 0 else 0
        keeps_L[place] = min(int(sizes_L[place]), max(1, quota))
        rest -= int(keeps_L[place])
    return keeps_L


def exact_budget(norms_L: Float64s, sizes_L: Int64s, budget: int) -> Int64s:
    """The same, but nothing of fragments without a norm, and the budget in all.

    Where there are fewer elements to hand out than fragments, those of the largest norms get one
    each; where all others have been served, what is left goes by descending norms to who has room.
    """
    keeps_L = np.zeros(sizes_L.size, np.int64)
    visited = [one for one in _descending(norms_L) if one[1] > 0]
    rest = min(budget, sum(int(sizes_L[place]) for place, _, _ in visited))
    if rest < len(visited):
        keeps_L[[place for place, _, _ in visited[:rest]]] = 1
        return keeps_L
    for number, (place, norm, norms_left) in enumerate(visited):
        later = len(visited) - number - 1
        quota = max(1, min(int(rest * norm / norms_left), rest - later))
        keeps_L[place] = min(int(sizes_L[place]), quota)
        rest -= int(keeps_L[place])
    for place, _, _ in visited:
        more = min(rest, int(sizes_L[place] - keeps_L[place]))
        keeps_L[place] += more
        rest -= more
    return keeps_L


def costs(sizes_L: Int64s, keeps_L: Int64s) -> Float64s:
    """Of selecting: size times log2 of how many are kept; 1 costs as much as 2."""
    of_one_L = np.log2(np.maximum(keeps_L, 2).astype(np.float64))
    return np.where(keeps_L > 0, sizes_L * of_one_L, 0.0)


def allocate(costs_L: Float64s, bins: int) -> Int64s:
    """A bin for every fragment: the dearest first, each to the lightest bin (DEFT, algorithm 4).

    Ties by number. The heaviest bin is at most 4/3 of the best possible (Graham, 1969).
    """
    loads = [0.0] * bins
    bins_L = np.zeros(costs_L.size, np.int64)
    for place in np.argsort(-costs_L, kind="stable").tolist():
        lightest = loads.index(min(loads))
        bins_L[place] = lightest
        loads[lightest] += float(costs_L[place])
    return bins_L


def _descending(norms_L: Float64s) -> list[tuple[int, float, float]]:
    """Place, norm, and the sum of it and all that follow; ties by place."""
    order = np.argsort(-norms_L, kind="stable").tolist()
    sorted_norms = [float(norms_L[place]) for place in order]
    left = [math.fsum(sorted_norms[number:]) for number in range(len(order))]
    return list(zip(order, sorted_norms, left, strict=True))
