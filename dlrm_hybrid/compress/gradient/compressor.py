"""What every compressor of gradients does, whatever its method; and the one that does nothing."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol, final

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections
from dlrm_hybrid.compress.gradient.layout import Layout
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.compress.report import SentReport
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Dtype, Section
from dlrm_hybrid.wire.sparse import Elements, decode_sparse, encode_sparse


class Sent(Protocol):
    """What is sent of some tensors; no longer valid once the next step is encoded."""

    @property
    def dtype(self) -> Dtype:
        """The type of values on the wire."""
        ...

    def elements(self, names: Sequence[str] | None = None) -> Elements:
        """The elements of some tensors, or of all, in their order."""
        ...

    def sections(self) -> dict[str, Section]:
        """The bytes of each tensor."""
        ...


@final
@dataclass(frozen=True, slots=True, eq=False)
class Selected:
    """Some elements of the tensors of a layout.

    Attributes:
        layout: of the tensors.
        all_elements: of all tensors, rounded to `dtype`.
        dtype: FLOAT32, BFLOAT16 or FLOAT16.
    """

    layout: Layout
    all_elements: Elements
    dtype: Dtype

    def elements(self, names: Sequence[str] | None = None) -> Elements:
        """The elements of some tensors, or of all, in their order."""
        if names is None or names == self.layout.names:
            return self.all_elements
        offsets_E, indices_K, values_K = self.all_elements
        bounds = dict(zip(self.layout.names, pairwise(offsets_E.tolist()), strict=True))
        parts = [slice(*bounds[name]) for name in names]
        return Elements(
            np.cumsum([0, *(part.stop - part.start for part in parts)]),
            np.concatenate([indices_K[part] for part in parts]),
            np.concatenate([values_K[part] for part in parts]),
        )

    def sections(self) -> dict[str, Section]:
        """The bytes of each tensor: the fewest that sections of their own can have."""
        layout = self.layout
        sections = encode_sparse(layout.ids, layout.sizes, *self.all_elements, self.dtype)
        return dict(zip(layout.names, sections, strict=True))


@final
@dataclass(frozen=True, slots=True, eq=False)
class Whole:
    """All elements of tensors, by name."""

    by_name: dict[str, Section]

    @property
    def dtype(self) -> Dtype:
        """The type of the first tensor's values."""
        return next(iter(self.by_name.values())).dtype

    def elements(self, names: Sequence[str] | None = None) -> Elements:
        """The elements of some tensors, or of all; raises SectionError of ternary ones."""
        return decode_sparse([self.by_name[name] for name in names or self.by_name])

    def sections(self) -> dict[str, Section]:
        """The bytes of each tensor."""
        return self.by_name


Encoding = Generator[Collective, Sections, Sent]
"""Yields the rounds of a step, is sent their results, and returns what is sent."""


class State(Protocol):
    """What a part of a compressor remembers from step to step."""

    def tensors(self) -> dict[str, Tensor]:
        """Views "<tensor>.<what>" of all of it, for checkpoints."""
        return {}

    def report(self, reports: Sequence[SentReport]) -> Sequence[SentReport]:
        """Add thresholds, if there are any, to the reports of all tensors; counting begins anew."""
        return reports


@final
class Stateless(State):
    """The empty state of a selector or transform that remembers nothing."""


class Compressor(Protocol):
    """Compresses one trainer's gradients: sends a part now, keeps the rest and sends it later.

    What the receiver decodes plus the new residual is the gradient plus the old residual, bit for
    bit; a method that draws keeps nothing and is right on average.
    """

    layout: Layout
    """The layout of its tensors."""

    homes: Sequence[torch.device] = ()
    """The devices of the gradients it reads, and of its state; none for the CPU."""

    @property
    def rounds(self) -> tuple[Op, ...]:
        """The collectives of each step; none where each trainer decides alone."""
        return ()

    @property
    def sends_levels(self) -> bool:
        """Whether all values are few multiples of a power of two, which are coded on their way."""
        return False

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        """Choose what is sent of the gradients of a step.

        It yields the collectives of the step and is sent their results.

        Nothing but `tensors` is kept between steps. What is sent may view the gradients.

        Args:
            gradients: by name, at least those of the specs; float32, contiguous, detached, not
                changed.
            step: counted from 0.

        Raises:
            DivergedError: a sum of gradient and residual is not finite; the residuals are then
                of no use and must not be saved.
            SectionError: the result of a round is not what its operation gives.
        """
        ...

    def take_back(self, sent: Sent) -> None:
        """Return what was encoded last, and has reached nobody, to the residual if there is one."""

    def flush(self) -> dict[str, Tensor]:
        """Take out the residuals, by tensor, so that none of them is sent later; may be empty.

        Momenta at the trainer stay: they are no part of the gradients.
        """
        return {}

    def tensors(self) -> dict[str, Tensor]:
        """Views of all state: a checkpoint reads them, and loading copies into them."""
        return {}

    def report(self) -> dict[str, SentReport]:
        """What was sent of each tensor since the last call."""
        ...


@final
class Dense(Compressor):
    """Sends every element of every gradient as float32.

    Values that are not finite travel on to the server, which looks for them in every mean.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self._steps = 0

    @override
    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        yield from ()
        self._steps += 1
        return Whole(
            {
                spec.name: dense(spec.id, host_array(gradients[spec.name], "gradient", spec.name))
                for spec in self.layout.specs
            }
        )

    @override
    def report(self) -> dict[str, SentReport]:
        steps, self._steps = self._steps, 0
        return all_sent(self.layout, steps)


def all_sent(layout: Layout, steps: int) -> dict[str, SentReport]:
    """The reports of a method that sends every element at every step."""
    return {
        spec.name: SentReport(elements=steps * spec.count, sent=steps * spec.count)
        for spec in layout.specs
    }
