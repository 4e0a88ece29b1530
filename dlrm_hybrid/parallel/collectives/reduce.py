"""Rounds in which the workers of a stage agree before they push, through a server.

All rounds of stage w go through server w mod S, whichever servers own its tensors.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

from dlrm_hybrid.compress.gradient.collective import Collective, Op, Sections, reduce
from dlrm_hybrid.parallel.collectives import rounds
from dlrm_hybrid.parallel.collectives.rounds import Agree, Propose
from dlrm_hybrid.parallel.dense.service import Handle
from dlrm_hybrid.parallel.effects import Effect, Receive
from dlrm_hybrid.parallel.outgoing import Outgoing, Send
from dlrm_hybrid.parallel.topology import DenseTensor, Topology
from dlrm_hybrid.types import DlrmError
from dlrm_hybrid.wire.frame import Frame, Kind
from dlrm_hybrid.wire.section import SectionError

Result = TypeVar("Result")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveClient:
    """A worker's side: its contributions, and what it waits for.

    Attributes:
        topology: of the world.
        rank: of the worker.
        attempt: how often the run has been restarted.
        send: to any rank.
    """

    topology: Topology
    rank: int
    attempt: int
    send: Send

    def run(
        self, step: int, encoding: Generator[Collective, Sections, Result]
    ) -> Generator[Effect, Any, Result]:
        """What an encoding returns, after all of its rounds; without rounds it waits for nothing.

        Args:
            step: counted from 0.
            encoding: of `Compressor.encode`.

        Raises:
            DlrmError: a result is not what its operation gives; names rank, step and round.
            DivergedError: a gradient is not finite.
        """
        try:
            collective = next(encoding)
        except StopIteration as end:
            return end.value
        server = self.topology.collective_server(self.rank % self.topology.stages)
        number = 0
        while True:
            self.send(server, self._frame(step, number, collective.value), 0)
            frame: Frame = yield Receive(Kind.AGREEMENT, server, step, number, microbatch=0)
            try:
                collective = encoding.send(frame.sections)
            except StopIteration as end:
                return end.value
            except SectionError as error:
                raise DlrmError(
                    f"{self.topology.name(self.rank)} (rank {self.rank}): agreement of rank "
                    f"{server} for step {step}, round {number}: {error}"
                ) from error
            number += 1

    def _frame(self, step: int, number: int, sections: Sections) -> Frame:
        return Frame(
            kind=Kind.PROPOSAL,
            sender=self.rank,
            attempt=self.attempt,
            step=step,
            boundary=number,
            microbatch=0,
            sections=sections,
        )


@final
class CollectiveServer:
    """Takes the contributions that come to a server, and hands all other frames on.

    Args:
        topology: of the world.
        index: of the server.
        tensors: all dense tensors of the model.
        ops: of the rounds of each step, at least one.
        attempt: how often the run has been restarted.
        others: takes what is no contribution: `ParameterServer.handle`.
    """

    def __init__(
        self,
        topology: Topology,
        index: int,
        tensors: Sequence[DenseTensor],
        ops: Sequence[Op],
        attempt: int,
        others: Handle,
    ) -> None:
        self._rank = topology.server(index)
        self._ops = ops
        self._attempt = attempt
        self._others = others
        self._counts = _elements(tensors)
        here = [stage for stage in self._counts if topology.collective_server(stage) == self._rank]
        groups = {stage: topology.stage_group(stage) for stage in here}
        self._state = rounds.start(len(ops), groups)
        self._proposed: dict[int, Sections] = {}

    def handle(self, frame: Frame) -> Sequence[Outgoing]:
        """Take a frame; the answers to send before the next call.

        Raises:
            DlrmError: a contribution is not due or not what the operation of its round takes; the
                message names rank and step. And what `others` raises.
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
        contributions = [self._proposed.pop(worker) for worker in action.to]
        op, count = self._ops[action.number], self._counts[action.stage]
        try:
            agreed = reduce(op, contributions, action.step, count)
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
            sections=agreed,
        )
        return [Outgoing(worker, frame, 0) for worker in action.to]


def _elements(tensors: Sequence[DenseTensor]) -> Mapping[int, int]:
    """Of all tensors of each stage."""
    counts: dict[int, int] = {}
    for tensor in tensors:
        counts[tensor.stage] = counts.get(tensor.stage, 0) + tensor.count
    return counts
