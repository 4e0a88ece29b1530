"""What every compressor of gradients does, whatever its method; and the one that does nothing."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections
from dlrm_hybrid.compress.gradient.layout import Layout, Spec
from dlrm_hybrid.compress.host import host_array
from dlrm_hybrid.wire.dense import dense
from dlrm_hybrid.wire.section import Section

Encoding = Generator[Collective, Sections, dict[str, Section]]
"""Yields the rounds of a step, is sent their results, and returns a section for each tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """What became of one tensor's gradients since the last report.

    Attributes:
        elements: of the tensor, times the steps.
        sent: elements that were sent, over all steps.
        threshold: the magnitude from which elements are sent now; None if there is none.
        threshold_sum: of the thresholds of all steps that had one.
        thresholds: how many steps that are.
        renewals: how often the threshold was found anew.
    """

    elements: int
    sent: int
    threshold: float | None = None
    threshold_sum: float = 0.0
    thresholds: int = 0
    renewals: int = 0


def all_sent(specs: Sequence[Spec], steps: int) -> dict[str, TensorReport]:
    """The reports of a method that sends every element at every step."""
    return {
        spec.name: TensorReport(elements=steps * spec.count, sent=steps * spec.count)
        for spec in specs
    }


class State(Protocol):
    """What a part of a compressor remembers from step to step."""

    def tensors(self) -> dict[str, Tensor]:
        """Views "<tensor>.<what>" of all of it, for checkpoints."""
        ...


@final
class Stateless(State):
    """The state of what remembers nothing, and finds no thresholds."""

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {}

    def report(self, reports: Sequence[TensorReport]) -> Sequence[TensorReport]:
        """The reports as they are."""
        return reports


class Compressor(Protocol):
    """One trainer's side of a method: it sends a part, keeps the rest, and sends that later.

    What the receiver decodes plus the new residual is the gradient plus the old residual, bit for
    bit; a method that draws keeps nothing and is right on average.
    """

    @property
    def specs(self) -> Sequence[Spec]:
        """The tensors it was made for."""
        ...

    @property
    def rounds(self) -> tuple[Op, ...]:
        """Of each step; none where each trainer decides alone."""
        ...

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        """One section per tensor, in the order of the specs; gradients join the residual once.

        Nothing but `tensors` is kept between steps. Sections may view the gradients.

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

    def tensors(self) -> dict[str, Tensor]:
        """Views of all state: a checkpoint reads them, and loading copies into them."""
        ...

    def report(self) -> dict[str, TensorReport]:
        """By tensor; the next report begins to count here."""
        ...


@final
class Dense(Compressor):
    """Every element as float32, nothing kept.

    Values that are not finite travel on to the server, which looks for them in every mean.

    Args:
        layout: of the tensors of a stage.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._steps = 0

    @property
    @override
    def specs(self) -> Sequence[Spec]:
        return self._layout.specs

    @property
    @override
    def rounds(self) -> tuple[Op, ...]:
        return ()

    @override
    def encode(self, gradients: Mapping[str, Tensor], step: int) -> Encoding:
        yield from ()
        self._steps += 1
        return {
            spec.name: dense(spec.id, host_array(gradients[spec.name], "gradient", spec.name))
            for spec in self.specs
        }

    @override
    def tensors(self) -> dict[str, Tensor]:
        return {}

    @override
    def report(self) -> dict[str, TensorReport]:
        steps, self._steps = self._steps, 0
        return all_sent(self.specs, steps)
