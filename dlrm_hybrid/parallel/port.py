"""Where a worker stands in its world, and how it sends from there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from dlrm_hybrid.parallel.effects import Send
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import Section


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A worker's rank in the topology, with its way to send.

    Attributes:
        topology: of the world.
        rank: of the worker.
        attempt: how often the run has been restarted.
        transmit: hands a frame to the network.
    """

    topology: Topology
    rank: int
    attempt: int
    transmit: Send

    @property
    def stage(self) -> int:
        """Of the worker, counted from 0."""
        return self.rank % self.topology.stages

    def __str__(self) -> str:
        return f"{self.topology.name(self.rank)} (rank {self.rank})"

    def send(
        self,
        to: int,
        kind: Kind,
        number: int,
        sections: tuple[Section, ...],
        *,
        boundary: int = 0,
        round_: int = 0,
        microbatch: int = 0,
        dense_bytes: int = 0,
    ) -> None:
        """Send a frame; its fields are those of `Frame`.

        Args:
            to: rank of the receiver.
            kind: what it is for.
            number: what frames of this kind count.
            sections: the tensors.
            boundary: between stages `boundary` and `boundary + 1`.
            round_: of a contribution.
            microbatch: of the batch.
            dense_bytes: what its tensors would take as full float32 tensors.
        """
        frame = Frame(
            kind=kind,
            sender=self.rank,
            attempt=self.attempt,
            number=number,
            boundary=boundary,
            round=round_,
            microbatch=microbatch,
            sections=sections,
        )
        self.transmit(to, frame, dense_bytes)
