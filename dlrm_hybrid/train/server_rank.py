"""A server in a process of its own: pushes in, versions out, and its tensors to who asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import final

from dlrm_hybrid.parallel.control import Topic, control, num_bytes, values_of
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.parallel.parameter_server import ParameterServer
from dlrm_hybrid.parallel.service import Handle
from dlrm_hybrid.telemetry.meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.wire.frame import Frame, Kind


@final
@dataclass(slots=True)
class AskedServer:
    """A parameter server that also hands out its tensors, as they are after a step.

    Attributes:
        server: owns the tensors.
        take: gets all frames that are no questions: `server.handle`, or what hands pushes on to it.
        rank: its own.
        attempt: how often the run has been restarted.
        meter: told what the answers are for.
        start: steps done before this attempt.
    """

    server: ParameterServer
    take: Handle
    rank: int
    attempt: int
    meter: RankMeter
    start: int
    _asked: list[Frame] = field(default_factory=list[Frame])

    def handle(self, frame: Frame) -> Sequence[Outgoing]:
        """As `take`; a question waits until all versions of its step are made."""
        self.meter.switch(self._phase(frame))
        if frame.kind is not Kind.CONTROL:
            outgoing = self.take(frame)
            return [*outgoing, *self._answers()] if self._asked else outgoing
        self._asked.append(frame)
        return self._answers()

    def _phase(self, frame: Frame) -> Phase:
        if frame.kind is Kind.CONTROL:
            return Phase.CHECKPOINT if _stage(frame) is None else Phase.EVALUATE
        return Phase.WARMUP if frame.step < self.start + WARMUP_STEPS else Phase.TRAIN

    def _answers(self) -> list[Outgoing]:
        ready = [frame for frame in self._asked if self.server.made(_stage(frame), frame.step)]
        self._asked = [frame for frame in self._asked if frame not in ready]
        return [self._answer(frame) for frame in ready]

    def _answer(self, frame: Frame) -> Outgoing:
        stage = _stage(frame)
        tensors = self.server.tensors() if stage is None else self.server.weights(stage)
        answer = control(self.rank, self.attempt, frame.step, Topic.TENSORS, {}, tensors)
        return Outgoing(frame.sender, answer, num_bytes(tensors))


def _stage(frame: Frame) -> int | None:
    """The stage whose weights are asked for; None asks for everything."""
    stage: int | None = values_of(frame)["stage"]
    return stage
