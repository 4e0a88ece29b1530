"""A worker's side of agreements: its proposals and what it waits for, before it pushes."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor

from dlrm_hybrid.compress.gradient.coordination import Party
from dlrm_hybrid.parallel.effects import Effect, Receive
from dlrm_hybrid.parallel.outgoing import Send
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import SectionError


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Negotiator:
    """Of one worker.

    Attributes:
        topology: of the world.
        rank: of the worker.
        attempt: how often the run has been restarted.
        party: of the compressor whose sections are pushed.
    """

    topology: Topology
    rank: int
    attempt: int
    party: Party

    def agree(
        self, step: int, gradients: Mapping[str, Tensor], send: Send
    ) -> Generator[Effect, Any, None]:
        """All rounds of a step.

        Args:
            step: counted from 0.
            gradients: by name, all of the stage's.
            send: to any rank.

        Raises:
            DlrmError: an agreement is not what the method agrees on; names rank, step and round.
            DivergedError: a gradient is not finite.
        """
        party = self.party
        own = {spec.name: gradients[spec.name].detach().contiguous() for spec in party.specs}
        server = self.topology.moderator(self.rank % self.topology.stages)
        for number in range(party.rounds):
            sections = tuple(party.propose(number, own, step))
            proposal = Frame(
                kind=Kind.PROPOSAL,
                sender=self.rank,
                attempt=self.attempt,
                step=step,
                boundary=number,
                microbatch=0,
                sections=sections,
            )
            send(server, proposal, 0)
            frame: Frame = yield Receive(Kind.AGREEMENT, server, step, number, microbatch=0)
            try:
                party.agree(number, frame.sections)
            except SectionError as error:
                raise DlrmError(
                    f"{self.topology.name(self.rank)} (rank {self.rank}): agreement of rank "
                    f"{server} for step {step}, round {number}: {error}"
                ) from error
