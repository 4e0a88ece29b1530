"""The server's side of collectives: gather a stage's contributions, reduce, answer.

All rounds of stage w go through server w mod S, whichever servers own its tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import final

from dlrm_hybrid.compress.gradient.collective import Op, Sections, reduce
from dlrm_hybrid.parallel.collectives import rounds
from dlrm_hybrid.parallel.collectives.rounds import Contribution, Reduce
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import SectionError


@final
class CollectiveServer:
    """Reduces the contributions of those stages whose rounds go through one server.

    Args:
        topology: ranks and roles of the world.
        index: which server this is.
        tensors: all dense tensors of the model.
        ops: operation of each round before a push, at least one.
        attempt: how often the run has been restarted.
    """

    def __init__(
        self,
        topology: Topology,
        index: int,
        tensors: Sequence[DenseTensor],
        ops: Sequence[Op],
        attempt: int,
    ) -> None:
        self._rank = topology.server(index)
        self._ops = ops
        self._attempt = attempt
        self._counts = _elements(tensors)
        here = [stage for stage in self._counts if topology.collective_server(stage) == self._rank]
        groups = {stage: topology.stage_group(stage) for stage in here}
        self._state = rounds.start(len(ops), groups)
        self._contributed: dict[int, Sections] = {}

    def handle(self, frame: Frame) -> Sequence[Outgoing]:
        """Handle a CONTRIBUTION frame; returns the frames to send before the next call.

        Raises:
            DlrmError: a contribution is not due or not what the operation of its round takes; the
                message names rank and push.
        """
        if frame.attempt != self._attempt:
            raise DlrmError(
                f"contribution of rank {frame.sender} to push {frame.number}: of attempt "
                f"{frame.attempt}, expected {self._attempt}"
            )
        event = Contribution(frame.sender, frame.number, frame.round)
        self._state, action = rounds.step(self._state, event)
        self._contributed[frame.sender] = frame.sections
        return [] if action is None else self._reduce(action)

    def _reduce(self, action: Reduce) -> list[Outgoing]:
        contributions = [self._contributed.pop(worker) for worker in action.to]
        op, count = self._ops[action.round], self._counts[action.stage]
        try:
            result = reduce(op, contributions, action.push, count)
        except SectionError as error:
            raise DlrmError(
                f"contributions of stage {action.stage} to push {action.push}, round "
                f"{action.round}: {error}"
            ) from error
        frame = Frame(
            kind=Kind.RESULT,
            sender=self._rank,
            attempt=self._attempt,
            number=action.push,
            round=action.round,
            sections=result,
        )
        return [Outgoing(worker, frame, 0) for worker in action.to]


def _elements(tensors: Sequence[DenseTensor]) -> Mapping[int, int]:
    """Number of elements per stage."""
    counts: dict[int, int] = {}
    for tensor in tensors:
        counts[tensor.stage] = counts.get(tensor.stage, 0) + tensor.count
    return counts
