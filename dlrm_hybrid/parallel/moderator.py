"""The server through which the workers of some stages agree before they push.

All agreements of stage w go through server w mod S, whichever servers own its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from dlrm_hybrid.compress.gradient.coordination import Coordination, Sections
from dlrm_hybrid.parallel import rounds
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.parallel.rounds import Agree, Propose
from dlrm_hybrid.parallel.service import Handle
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import SectionError


@final
class Moderator:
    """Takes the proposals that come to a server, and hands all other frames on.

    Args:
        topology: of the world.
        index: of the server.
        tensors: all dense tensors of the model.
        coordination: what becomes of proposals.
        attempt: how often the run has been restarted.
        others: takes what is no proposal: `ParameterServer.handle`.
    """

    def __init__(
        self,
        topology: Topology,
        index: int,
        tensors: Sequence[DenseTensor],
        coordination: Coordination,
        attempt: int,
        others: Handle,
    ) -> None:
        self._topology = topology
        self._rank = topology.server(index)
        self._coordination = coordination
        self._attempt = attempt
        self._others = others
        self._counts = _elements(tensors)
        here = [stage for stage in self._counts if topology.moderator(stage) == self._rank]
        groups = {stage: topology.stage_group(stage) for stage in here}
        self._state = rounds.start(coordination.rounds, groups)
        self._proposed: dict[int, Sections] = {}

    def handle(self, frame: Frame) -> Sequence[Outgoing]:
        """Take a frame; the answers to send before the next call.

        Raises:
            DlrmError: a proposal is not due or not what the method proposes; the message names
                rank and step. And what `others` raises.
        """
        if frame.kind is not Kind.PROPOSAL:
            return self._others(frame)
        if frame.attempt != self._attempt:
            raise DlrmError(
                f"proposal of rank {frame.sender} for step {frame.step}: of attempt "
                f"{frame.attempt}, expected {self._attempt}"
            )
        event = Propose(frame.sender, frame.step, frame.boundary)
        self._state, action = rounds.step(self._state, event)
        self._proposed[frame.sender] = frame.sections
        return [] if action is None else self._agree(action)

    def _agree(self, action: Agree) -> list[Outgoing]:
        proposals = [self._proposed.pop(worker) for worker in action.to]
        count = self._counts[action.stage]
        try:
            agreed = self._coordination.combine(action.number, action.step, proposals, count)
        except SectionError as error:
            raise DlrmError(
                f"proposals of stage {action.stage} for step {action.step}, round "
                f"{action.number}: {error}"
            ) from error
        frame = Frame(
            kind=Kind.AGREEMENT,
            sender=self._rank,
            attempt=self._attempt,
            step=action.step,
            boundary=action.number,
            microbatch=0,
            sections=tuple(agreed),
        )
        return [Outgoing(worker, frame, 0) for worker in action.to]


def _elements(tensors: Sequence[DenseTensor]) -> Mapping[int, int]:
    """Of all tensors of each stage."""
    counts: dict[int, int] = {}
    for tensor in tensors:
        counts[tensor.stage] = counts.get(tensor.stage, 0) + tensor.count
    return counts
