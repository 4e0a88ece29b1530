"""A table server process: lookups, updates, and its shards of checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.parallel.dense.server import Handle
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import message, values_of
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS, RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.saver import piece_groups
from dlrm_hybrid.train.server_rank import lower, part_answer, shard_answer
from dlrm_hybrid.types import DlrmError, Version
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind


@final
@dataclass(slots=True, kw_only=True)
class TableServerRank:
    """Handles all frames that come to a table server rank.

    Attributes:
        server: owns the rows.
        rank: that of the table server.
        attempt: how often the run has been restarted.
        meter: meters by the phase of the answers.
        staleness: number of batches ahead that trainers request rows.
        writer: writes its shards of checkpoints.
        elastic: whether trainers may be lost while others go on.
        lowered: first steps of lower learning rates; appended to.
    """

    server: TableServer
    rank: int
    attempt: int
    meter: RankMeter
    staleness: int
    writer: ShardWriter
    elastic: bool = False
    lowered: list[int] = field(default_factory=list[int])
    _first: dict[int, int] = field(default_factory=dict[int, int])
    _waiting: list[Frame] = field(default_factory=list[Frame])

    def handlers(self) -> Mapping[Kind, Handle]:
        """Handlers by frame kind."""
        return {
            Kind.LOOKUP: self._serve,
            Kind.UPDATE: self._serve,
            Kind.FETCH: self._ask,
            Kind.SAVE: self._ask,
            Kind.SHARD: self._shard,
            Kind.LOWER: self._lower,
        }

    def _serve(self, frame: Frame) -> Sequence[Outgoing]:
        ahead = self.staleness if frame.kind is Kind.LOOKUP else 0  # relative to the tick that asks
        if frame.kind is Kind.UPDATE:
            self._first.setdefault(frame.sender, frame.number)
        first = self._first.get(frame.sender, frame.number)
        is_warm = frame.number - ahead >= first + WARMUP_STEPS
        phase = Phase.TRAIN if is_warm else Phase.WARMUP
        self.meter.switch(Phase.EVALUATE if frame.microbatch == EVALUATION else phase)
        outgoing = self.server.handle(frame)
        return [*outgoing, *self._answers()] if self._waiting else outgoing

    def _ask(self, frame: Frame) -> Sequence[Outgoing]:
        """Keep a request about the tables until they have the version of its step."""
        self._waiting.append(frame)
        return self._answers()

    def _answers(self) -> list[Outgoing]:
        ready = [one for one in self._waiting if self._due(one) <= self.server.version]
        self._waiting = [one for one in self._waiting if one not in ready]
        return [self._answer(frame) for frame in ready]

    def _answer(self, frame: Frame) -> Outgoing:
        if frame.kind is Kind.FETCH:
            self.meter.switch(Phase.EVALUATE)
            return part_answer(self.server.pieces(), frame, self.rank, self.attempt)
        self.meter.switch(Phase.CHECKPOINT)
        step = values_of(frame)["step"]
        if self.server.version > self._due(frame):
            raise DlrmError(
                f"rank {self.rank}: asked to save the tables of step {step}, which are at version "
                f"{self.server.version}"
            )
        self.writer.begin(step, piece_groups(self.server.pieces()))
        answer = message(Kind.COPIED, self.rank, self.attempt, frame.number, {})
        return Outgoing(frame.sender, answer, 0)

    def _due(self, frame: Frame) -> Version:
        if self.elastic:  # all present trainers have settled; a lost one's updates may be too few
            return self.server.version  # or, of batches given out again, too many
        return self.server.version_at(values_of(frame)["step"])

    def _lower(self, frame: Frame) -> Sequence[Outgoing]:
        return lower(self.lowered, frame)

    def _shard(self, frame: Frame) -> Sequence[Outgoing]:
        self.meter.switch(Phase.CHECKPOINT)
        return [shard_answer(self.writer, frame, self.rank, self.attempt)]
