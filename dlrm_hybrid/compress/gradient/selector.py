"""Which elements of residual plus gradient are sent: the one thing in which sparsifiers differ.

A selector that needs the other trainers yields a `Collective` and is sent its result; one that
decides alone never yields. Who drives it says how results come about: a server, or no network.

Shapes: N elements of all tensors of a stage, K of them selected.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import numpy as np
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s, Float64s, Int32s
from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections
from dlrm_hybrid.compress.gradient.compressor import State, Stateless
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.kernels import magnitudes
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import index_set, index_set_of

if TYPE_CHECKING:
    from dlrm_hybrid.compress.gradient.thresholded import Thresholds, ThresholdSelector

Selection = Generator[Collective, Sections, Indices]


class Accumulated(Protocol):
    """Residual plus gradient of a step, wherever they are.

    All methods raise DivergedError if a value is not finite.
    """

    layout: Layout
    """The layout of its tensors."""

    def require_finite(self) -> None:
        """Look whether all values are finite."""
        ...

    def norms(self, fragments: Sequence[slice]) -> Float64s:
        """The L2 norms of parts of the flat vector, each of one tensor; float64 (L)."""
        ...

    def largest(self, quotas: Sequence[tuple[slice, int]]) -> list[Int32s]:
        """Indices of the k largest magnitudes of each part, as the function `largest`.

        Args:
            quotas: the whole vector, or parts of it in their order, each of one tensor; and k.
        """
        ...

    def meeting(self, selector: ThresholdSelector, state: Thresholds, step: int) -> Indices:
        """The elements that meet thresholds."""
        ...

    def values_at(self, indices: Indices) -> Float32s:
        """The values at some elements."""
        ...


class Selector(Protocol):
    """Selects the elements that are sent at a step; remembers nothing itself.

    `state` is what `init` made for the layout, changed in place.
    """

    @property
    def rounds(self) -> tuple[Op, ...]:
        """The collectives of each step; none where the trainer decides alone."""
        return ()

    def init(self, layout: Layout) -> State:
        """Fresh state for the tensors of a layout."""
        return Stateless()

    def select(self, x: Accumulated, state: Any, step: int) -> Selection:
        """Select the elements to send; yields the collectives of `rounds`.

        Raises:
            DivergedError: a value of `x` is not finite.
            SectionError: the result of a round is not what its operation gives.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class LargestOfAll(Selector):
    """Selects the k largest of all tensors together, the first of equals.

    Aji and Heafield, Sparse communication for distributed gradient descent, EMNLP 2017.

    Attributes:
        k: how many; fewer are selected where the rest is zero.
    """

    k: int

    @override
    def select(self, x: Accumulated, state: Stateless, step: int) -> Selection:
        yield from ()
        (flat_K,) = x.largest([(slice(0, x.layout.size), self.k)])
        return Indices.of_flat(x.layout, flat_K)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FromLeader(Selector):
    """CLT-k: selects what one trainer, another at each step, has selected for all.

    So a pull is as sparse as a push, however many trainers there are (Chen et al., ScaleCom,
    NeurIPS 2020, algorithm 1).

    Attributes:
        inner: selects where this trainer leads; decides alone.
        trainer: number of this trainer.
        trainers: how many there are.
    """

    inner: Selector
    trainer: int
    trainers: int

    @property
    @override
    def rounds(self) -> tuple[Op, ...]:
        return (Op.LEADER,)

    @override
    def init(self, layout: Layout) -> State:
        return self.inner.init(layout)

    @override
    def select(self, x: Accumulated, state: Any, step: int) -> Selection:
        if step % self.trainers == self.trainer:
            indices = yield from self.inner.select(x, state, step)
            contribution = (index_set(indices.flat, x.layout.size),)
        else:
            x.require_finite()  # before others wait
            contribution = ()
        agreed = yield Collective(Op.LEADER, contribution)
        return Indices.of_flat(x.layout, index_set_of(agreed, x.layout.size))


@final
@dataclass(frozen=True, slots=True)
class Union(Selector):
    """Selects what any trainer has selected: all send the union.

    DEFT's authors do so with every method they compare with.

    Residuals stay smaller than where each sends its own selection alone, and pushes are as large as
    pulls (Yoon and Oh, DEFT, ICPP 2023, algorithm 1).

    Attributes:
        inner: selects; decides alone.
        dtype: of the values sent: what it rounds to zero need not be sent.
    """

    inner: Selector
    dtype: Dtype

    @property
    @override
    def rounds(self) -> tuple[Op, ...]:
        return (Op.UNION,)

    @override
    def init(self, layout: Layout) -> State:
        return self.inner.init(layout)

    @override
    def select(self, x: Accumulated, state: Any, step: int) -> Selection:
        indices = yield from self.inner.select(x, state, step)
        flat_K = indices.flat
        if self.dtype is not Dtype.FLOAT32:
            flat_K = flat_K[narrow(x.values_at(indices), self.dtype) != 0]
        agreed = yield Collective(Op.UNION, (index_set(flat_K, x.layout.size),))
        return Indices.of_flat(x.layout, index_set_of(agreed, x.layout.size))


def largest(values_N: Float32s, k: int) -> Int32s:
    """Indices of the k largest magnitudes, increasing; the first of equals, fewer if the rest is 0.

    Args:
        values_N: float32, contiguous, finite.
        k: 0 to N.
    """
    if k == 0:
        return np.empty(0, np.int32)
    tau = magnitudes.kth_magnitude(values_N, k)
    indices_K = magnitudes.reaching(values_N, tau)
    surplus = indices_K.size - k
    if surplus > 0:
        ties = np.flatnonzero(np.abs(values_N[indices_K]) == np.float32(tau))
        indices_K = np.delete(indices_K, ties[-surplus:])
    return indices_K
