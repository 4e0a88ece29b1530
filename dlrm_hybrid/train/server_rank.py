"""A server in a process of its own: pushes in, versions out; weights to who asks, checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, final

from torch import Tensor

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.model.tensors import whole
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.dense.service import Handle
from dlrm_hybrid.parallel.messages import Topic, control, num_bytes, values_of
from dlrm_hybrid.parallel.outgoing import Outgoing
from dlrm_hybrid.telemetry.meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.engine import piece_groups
from dlrm_hybrid.wire.frame import Frame, Kind


@final
@dataclass(slots=True)
class AskedServer:
    """A parameter server that also hands out its weights, and saves all it has, after a step.

    Attributes:
        server: owns the tensors.
        take: gets all frames that are no questions: `server.handle`, or what hands pushes on to it.
        rank: its own.
        attempt: how often the run has been restarted.
        meter: told what the answers are for.
        start: steps done before this attempt.
        writer: of its part of checkpoints.
    """

    server: ParameterServer
    take: Handle
    rank: int
    attempt: int
    meter: RankMeter
    start: int
    writer: ShardWriter
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
            return Phase.EVALUATE if frame.boundary == Topic.FETCH else Phase.CHECKPOINT
        return Phase.WARMUP if frame.step < self.start + WARMUP_STEPS else Phase.TRAIN

    def _answers(self) -> list[Outgoing]:
        ready = [frame for frame in self._asked if self._is_ready(frame)]
        self._asked = [frame for frame in self._asked if frame not in ready]
        return [self._answer(frame) for frame in ready]

    def _is_ready(self, frame: Frame) -> bool:
        if frame.boundary == Topic.SHARD:
            return True
        stage = values_of(frame)["stage"] if frame.boundary == Topic.FETCH else None
        return self.server.made(stage, frame.step)

    def _answer(self, frame: Frame) -> Outgoing:
        values: dict[str, Any] = {}
        tensors: Mapping[str, Tensor] = {}
        if frame.boundary == Topic.FETCH:
            topic, tensors = Topic.TENSORS, self.server.weights(values_of(frame)["stage"])
        elif frame.boundary == Topic.SAVE:
            topic = Topic.COPIED
            self.writer.begin(frame.step, piece_groups(whole(self.server.tensors())))
        else:
            topic = Topic.SHARD
            shard = self.writer.take(values_of(frame)["wait_seconds"])
            values = {"shard": None if shard is None else asdict(shard)}
        answer = control(self.rank, self.attempt, frame.step, topic, values, tensors)
        return Outgoing(frame.sender, answer, num_bytes(tensors))
