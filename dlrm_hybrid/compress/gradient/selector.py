"""Which elements of residual plus gradient are sent: the one thing in which sparsifiers differ.

A selector that needs the other trainers yields a `Collective` and is sent its result; one that
decides alone never yields. Who drives it says how results come about: a server, or no network.

Shapes: N elements of all tensors of a stage, K of them selected.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np
from typing_extensions import override

from dlrm_hybrid.arrays import Float32s, Int32s
from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections
from dlrm_hybrid.compress.gradient.compressor import State, Stateless
from dlrm_hybrid.compress.gradient.layout import Indices, Layout
from dlrm_hybrid.compress.gradient.residual import Residual
from dlrm_hybrid.kernels import magnitudes
from dlrm_hybrid.wire.dense import narrow
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.sparse import index_set, index_set_of

Selection = Generator[Collective, Sections, Indices]


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

    def select(self, x: Residual, state: Any, step: int) -> Selection:
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
    def select(self, x: Residual, state: Stateless, step: int) -> Selection:
        yield from ()
        return Indices.of_flat(x.layout, largest(x.values, self.k))


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
    def select(self, x: Residual, state: Any, step: int) -> Selection:
        if step % self.trainers == self.trainer:
            indices = yield from self.inner.select(x, state, step)
            contribution = (index_set(indices.flat, x.layout.size),)
        else:
            _ = x.values  # what is not finite must be found before others wait
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
    def select(self, x: Residual, state: Any, step: int) -> Selection:
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
