"""Effects: what a worker's step asks of its runner, and how it sends to other ranks.

A worker's step is a generator: it yields an effect and is sent the result. In a process of its own
`ProcessRunner` carries an effect out at once; `InProcessRunner` interleaves the steps of all
workers. Both run the same numeric code.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, final

from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import Section

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, eq=False)
class GroupCall:
    """Compute once for all workers of a group in one process; each is sent its own result.

    Attributes:
        group: ranks of the workers.
        compute: values to results, both in the order of `group`; the same function for all.
        value: this worker's argument.
    """

    group: tuple[int, ...]
    compute: Callable[[Sequence[Any]], Sequence[Any]]
    value: Any


StepEffect = Receive | GroupCall
Program = Generator[StepEffect, Any, Result]
"""A worker's computation: yields effects, is sent their results, and returns its own."""

Send = Callable[[int, Frame, int], None]
"""(to, frame, dense_equivalent_bytes); encodes the frame before it returns, never waits."""


class Outgoing(NamedTuple):
    """A frame to be sent: the arguments of `Channel.send`.

    Attributes:
        to: rank of the receiver.
        frame: may show memory that changes with the next step: send it before that.
        dense_equivalent_bytes: what its tensors would take as full float32 tensors.
    """

    to: int
    frame: Frame
    dense_equivalent_bytes: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """A worker's rank in the topology, with its way to send.

    Attributes:
        topology: ranks and roles of the world.
        rank: rank of the worker.
        attempt: how often the run has been restarted.
        transmit: hands a frame to the network.
    """

    topology: Topology
    rank: int
    attempt: int
    transmit: Send

    @property
    def stage(self) -> int:
        """Stage of the worker, counted from 0."""
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
            kind: kind of the frame.
            number: the number that frames of this kind count.
            sections: the tensors.
            boundary: lies between stages `boundary` and `boundary + 1`.
            round_: round of a contribution.
            microbatch: number in the batch.
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
