"""Which elements of residual plus gradient are sent: the one thing in which sparsifiers differ.

A selector that needs the other trainers yields a `Collective` and is sent its result; one that
decides alone never yields. Who drives it says how results come about: a server, or no network.

Shapes: N elements of all tensors of a stage, K of them selected.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, final

import numpy as np
from torch import Tensor

from dlrm_hybrid.compress.gradient.accumulated import Accumulated
from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections
from dlrm_hybrid.compress.gradient.layout import Float32s, Indices, Int32s, Layout
from dlrm_hybrid.kernels.histogram import magnitude_of_rank
from dlrm_hybrid.kernels.largest import list_largest
from dlrm_hybrid.wire.index_set import index_set, only_index_set_of
from dlrm_hybrid.wire.section import Dtype
from dlrm_hybrid.wire.values import narrow

Selection = Generator[Collective, Sections, Indices]


@dataclass(frozen=True, slots=True, kw_only=True)
class ThresholdReport:
    """The thresholds of one tensor since the last report.

    Attributes:
        threshold: the magnitude from which elements are sent now; None before the first.
        total: of the thresholds of all steps that had one.
        steps: how many steps that are.
        renewals: how often the threshold was found anew.
    """

    threshold: float | None
    total: float
    steps: int
    renewals: int


class State(Protocol):
    """What a selector remembers from step to step."""

    def tensors(self) -> dict[str, Tensor]:
        """Views "<tensor>.<what>" of all of it, for checkpoints."""
        ...

    def report(self) -> Sequence[ThresholdReport]:
        """By tensor, nothing where there are no thresholds; the next report begins here."""
        ...


@final
class Stateless:
    """Of selectors that remember nothing."""

    def tensors(self) -> dict[str, Tensor]:
        """None."""
        return {}

    def report(self) -> Sequence[ThresholdReport]:
        """No thresholds."""
        return ()


StateT = TypeVar("StateT")


class Selector(Protocol[StateT]):
    """Selects the elements that are sent at a step; keeps nothing itself.

    `state` is what `init` made for the layout, changed in place.
    """

    @property
    def rounds(self) -> tuple[Op, ...]:
        """Of each step; none where the trainer decides alone."""
        ...

    def init(self, layout: Layout) -> StateT:
        """Fresh memory for the tensors of a layout."""
        ...

    def select(self, x: Accumulated, state: StateT, step: int) -> Selection:
        """The elements to send.

        Args:
            x: residual plus gradient.
            state: of `init`.
            step: counted from 0.

        Raises:
            DivergedError: a value of `x` is not finite.
            SectionError: the result of a round is not what its operation gives.
        """
        ...


@final
@dataclass(frozen=True, slots=True)
class TopK:
    """The k largest of all tensors together, the first of equals (Aji and Heafield, EMNLP 2017).

    Attributes:
        k: how many; fewer are selected where the rest is zero.
    """

    k: int

    @property
    def rounds(self) -> tuple[Op, ...]:
        """None."""
        return ()

    def init(self, layout: Layout) -> Stateless:
        """Nothing."""
        return Stateless()

    def select(self, x: Accumulated, state: Stateless, step: int) -> Selection:
        """Those of the largest magnitudes."""
        yield from ()
        return Indices.of_flat(x.layout, largest(x.values, self.k))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FromLeader:
    """CLT-k: all send what one of them selects, another trainer at each step.

    So a pull is as sparse as a push, however many trainers there are (Chen et al., ScaleCom,
    NeurIPS 2020, algorithm 1).

    Attributes:
        inner: selects where this trainer leads; decides alone.
        trainer: number of this one.
        trainers: how many there are.
    """

    inner: Selector[Any]
    trainer: int
    trainers: int

    @property
    def rounds(self) -> tuple[Op, ...]:
        """One, in which the leader speaks and all others listen."""
        return (Op.LEADER,)

    def init(self, layout: Layout) -> Any:
        """That of the inner selector."""
        return self.inner.init(layout)

    def select(self, x: Accumulated, state: Any, step: int) -> Selection:
        """The leader's selection."""
        if step % self.trainers == self.trainer:
            own = yield from self.inner.select(x, state, step)
            contribution = (index_set(own.flat, x.layout.size),)
        else:
            _ = x.values  # what is not finite must be found before others wait
            contribution = ()
        agreed = yield Collective(Op.LEADER, contribution)
        return Indices.of_flat(x.layout, only_index_set_of(agreed, x.layout.size))


@final
@dataclass(frozen=True, slots=True)
class Union:
    """All send what any of them selects, as DEFT's authors do with every method they compare with.

    Residuals stay smaller than where each sends its own selection alone, and pushes are as large as
    pulls (Yoon and Oh, DEFT, ICPP 2023, algorithm 1).

    Attributes:
        inner: selects; decides alone.
        dtype: of the values sent: what it rounds to zero need not be sent.
    """

    inner: Selector[Any]
    dtype: Dtype

    @property
    def rounds(self) -> tuple[Op, ...]:
        """One."""
        return (Op.UNION,)

    def init(self, layout: Layout) -> Any:
        """That of the inner selector."""
        return self.inner.init(layout)

    def select(self, x: Accumulated, state: Any, step: int) -> Selection:
        """The union of all trainers' selections."""
        own = yield from self.inner.select(x, state, step)
        flat_K = own.flat
        if self.dtype is not Dtype.FLOAT32:
            flat_K = flat_K[narrow(x.values_at(own), self.dtype) != 0]
        agreed = yield Collective(Op.UNION, (index_set(flat_K, x.layout.size),))
        return Indices.of_flat(x.layout, only_index_set_of(agreed, x.layout.size))


def largest(values_N: Float32s, k: int) -> Int32s:
    """Indices of the k largest magnitudes, increasing; the first of equals, fewer if the rest is 0.

    Args:
        values_N: float32, contiguous, finite.
        k: 0 to N.
    """
    if k == 0:
        return np.empty(0, np.int32)
    indices_N = np.empty(values_N.size, np.int32)
    tau = magnitude_of_rank(values_N, k)
    return indices_N[: list_largest(values_N, tau, k, indices_N)].copy()
