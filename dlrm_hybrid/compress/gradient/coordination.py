"""What methods do that agree before they send: rounds of proposals and agreements in each step.

In a round every trainer proposes sections, a server combines them, and every trainer gets the same
agreement. The tensors of such a method are those of one stage, as one vector of N elements in the
order of the specs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from dlrm_hybrid.compress.gradient.compressor import GradientCompressor, Spec
from dlrm_hybrid.wire.section import Section

Sections = Sequence[Section]


class Coordination(Protocol):
    """The server's side: it remembers nothing between two calls."""

    @property
    def rounds(self) -> int:
        """Of each step, at least 1."""
        ...

    def combine(
        self, number: int, step: int, proposals: Sequence[Sections], count: int
    ) -> Sections:
        """The agreement of a round.

        Args:
            number: of the round, counted from 0.
            step: counted from 0.
            proposals: of all trainers, in their order.
            count: N.

        Raises:
            SectionError: a proposal is not what the method proposes.
        """
        ...


class Party(Protocol):
    """A trainer's side of the rounds: `propose` and `agree` in turns."""

    @property
    def specs(self) -> Sequence[Spec]:
        """The tensors it was made for."""
        ...

    @property
    def rounds(self) -> int:
        """Of each step, as the server's."""
        ...

    def propose(self, number: int, gradients: Mapping[str, Tensor], step: int) -> Sections:
        """What this trainer has to say in a round.

        Args:
            number: of the round, counted from 0.
            gradients: as for `encode`.
            step: counted from 0.

        Raises:
            DivergedError: as `encode`.
        """
        ...

    def agree(self, number: int, agreed: Sections) -> None:
        """Take what the round came to.

        Raises:
            SectionError: it is not what the method agrees on.
        """
        ...


class CoordinatedCompressor(Party, GradientCompressor, Protocol):
    """A trainer's side of a step: its rounds, then `encode`.

    The gradients of a step join the residual in its first round; `encode` is called with the same.
    Between steps nothing is kept of an agreement: what `tensors` shows is all state.
    """
