"""What every compressor of gradients does, whatever its method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

from torch import Tensor

from dlrm_hybrid.wire.section import Section


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor whose gradient is sent.

    Attributes:
        id: its number on the wire, `Section.tensor`.
        name: its name among the parameters.
        shape: of the parameter and of its gradient.
    """

    id: int
    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorReport:
    """What became of one tensor's gradients since the last report.

    Attributes:
        elements: of the tensor, times the steps.
        sent: elements that left, over all steps.
        threshold: the magnitude from which elements leave now; None before the first.
        threshold_sum: of the thresholds of all steps that had one.
        thresholds: how many steps that are.
        renewals: how often the threshold was determined anew.
    """

    elements: int
    sent: int
    threshold: float | None
    threshold_sum: float
    thresholds: int
    renewals: int


def without_threshold(elements: int, sent: int) -> TensorReport:
    """The report of a method that has none."""
    return TensorReport(
        elements=elements, sent=sent, threshold=None, threshold_sum=0.0, thresholds=0, renewals=0
    )


class GradientCompressor(Protocol):
    """One trainer's side: it sends a part, keeps the rest, and sends that later.

    What the receiver decodes plus the new residual is the gradient plus the old residual, bit for
    bit; a method that draws keeps nothing and is right on average.
    """

    @property
    def specs(self) -> Sequence[Spec]:
        """The tensors it was made for."""
        ...

    def encode(self, gradients: Mapping[str, Tensor], step: int) -> dict[str, Section]:
        """One section per tensor, in the order of the specs; gradients join the residual once.

        Args:
            gradients: by name, at least those of the specs; float32, contiguous, detached, not
                changed.
            step: counted from 0.

        Sections may view the gradients.

        Raises:
            DivergedError: a sum of gradient and residual is not finite; the residuals are then
                of no use and must not be saved.
        """
        ...

    def tensors(self) -> dict[str, Tensor]:
        """Views of all state: a checkpoint reads them, and loading copies into them."""
        ...

    def report(self) -> dict[str, TensorReport]:
        """By tensor; the next report begins to count here."""
        ...
