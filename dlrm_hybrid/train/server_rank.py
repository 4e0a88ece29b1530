"""Server processes, of weights and of tables: their answers, their phase and their shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.model.tensors import Piece, in_groups, parts
from dlrm_hybrid.parallel.dense.server import Handle, ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import message, num_bytes, piece_message, values_of
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS, RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.types import DlrmError, Group, Version
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind


@final
@dataclass(slots=True, kw_only=True)
class ServerRank:
    """Handles all frames that come to a server rank.

    Attributes:
        server: owns the tensors.
        collect: handles contributions; None if the method has no rounds.
        rank: rank of the server.
        attempt: how often the run has been restarted.
        switch: called with the phase of the next answers.
        writer: writes its shards of checkpoints.
        elastic: whether trainers may be lost, each with its last counted push.
        lowered: first steps of lower learning rates; appended to.
    """

    server: ParameterServer
    collect: Handle | None
    rank: int
    attempt: int
    switch: Callable[[Phase], None]
    writer: ShardWriter
    elastic: bool = False
    lowered: list[int] = field(default_factory=list[int])
    _first: dict[int, int] = field(default_factory=dict[int, int])
    _waiting: list[Frame] = field(default_factory=list[Frame])

    def handlers(self) -> Mapping[Kind, Handle]:
        """Handlers by frame kind."""
        handlers = {
            Kind.PUSH: self._push,
            Kind.PULL: self._pull,
            Kind.FETCH: self._ask,
            Kind.SAVE: self._ask,
            Kind.SHARD: self._shard,
            Kind.LEFT: self._left,
            Kind.LOWER: partial(lower, self.lowered),
        }
        return handlers if self.collect is None else {**handlers, Kind.CONTRIBUTION: self._collect}

    def _push(self, frame: Frame) -> Sequence[Outgoing]:
        self.switch(self._training(frame))
        outgoing = self.server.handle(frame)
        return [*outgoing, *self._answers()] if self._waiting else outgoing

    def _left(self, frame: Frame) -> Sequence[Outgoing]:
        return [*self.server.leave(frame.sender), *self._answers()]

    def _pull(self, frame: Frame) -> Sequence[Outgoing]:
        self.switch(Phase.CHECKPOINT)
        return self.server.handle(frame)

    def _collect(self, frame: Frame) -> Iterable[Outgoing]:
        assert self.collect is not None
        self.switch(self._training(frame))
        return self.collect(frame)

    def _training(self, frame: Frame) -> Phase:
        """The phase of a frame's worker; workers may differ in earlier pushes."""
        first = self._first.setdefault(frame.sender, frame.number)
        return Phase.WARMUP if frame.number < first + WARMUP_STEPS else Phase.TRAIN

    def _ask(self, frame: Frame) -> Sequence[Outgoing]:
        """Keep a request about weights until they have the version it names."""
        self.switch(Phase.EVALUATE if frame.kind is Kind.FETCH else Phase.CHECKPOINT)
        self._waiting.append(frame)
        return self._answers()

    def _answers(self) -> list[Outgoing]:
        ready = [frame for frame in self._waiting if self._is_ready(frame)]
        self._waiting = [frame for frame in self._waiting if frame not in ready]
        return [self._answer(frame) for frame in ready]

    def _is_ready(self, frame: Frame) -> bool:
        if frame.kind is Kind.SAVE and self.elastic:
            return True  # all present workers had an answer after their last pushes
        values = values_of(frame)
        if (pushed := values.get("pushed")) is not None:
            return all(self.server.has_version(*pair) for pair in enumerate(pushed))
        return self.server.has_version(values.get("stage"), frame.number)

    def _answer(self, frame: Frame) -> Outgoing:
        values = values_of(frame)
        if frame.kind is Kind.FETCH and "part" in values:
            weights = in_groups(self.server.pieces(), Group.DENSE)
            return part_answer(weights, frame, self.rank, self.attempt)
        if frame.kind is Kind.FETCH:
            tensors = self.server.weights(values["stage"])
            answer = message(Kind.WEIGHTS, self.rank, self.attempt, frame.number, {}, tensors)
            return Outgoing(frame.sender, answer, num_bytes(tensors))
        self.writer.begin(values["step"], self.server.pieces())
        answer = message(Kind.COPIED, self.rank, self.attempt, frame.number, {})
        return Outgoing(frame.sender, answer, 0)

    def _shard(self, frame: Frame) -> Sequence[Outgoing]:
        self.switch(Phase.CHECKPOINT)
        return [shard_answer(self.writer, frame, self.rank, self.attempt)]


@final
@dataclass(slots=True, kw_only=True)
class TableServerRank:
    """Handles all frames that come to a table server rank.

    Attributes:
        server: owns the rows.
        rank: rank of the table server.
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
            Kind.LOWER: partial(lower, self.lowered),
            Kind.LEFT: self._left,
        }

    def _left(self, frame: Frame) -> Sequence[Outgoing]:
        self.server.forget(frame.sender)
        return ()

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
        ready = [frame for frame in self._waiting if self._due(frame) <= self.server.version]
        self._waiting = [frame for frame in self._waiting if frame not in ready]
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
        self.writer.begin(step, self.server.pieces())
        answer = message(Kind.COPIED, self.rank, self.attempt, frame.number, {})
        return Outgoing(frame.sender, answer, 0)

    def _due(self, frame: Frame) -> Version:
        if self.elastic:  # all present trainers have settled; a lost one's updates may be too few
            return self.server.version  # or, of batches given out again, too many
        return self.server.version_at(values_of(frame)["step"])

    def _shard(self, frame: Frame) -> Sequence[Outgoing]:
        self.meter.switch(Phase.CHECKPOINT)
        return [shard_answer(self.writer, frame, self.rank, self.attempt)]


def lower(lowered: list[int], frame: Frame) -> Sequence[Outgoing]:
    """Handle LOWER, which comes from several stages: add the first step of lower rates."""
    if frame.number not in lowered:
        lowered.append(frame.number)
    return ()


def shard_answer(writer: ShardWriter, frame: Frame, rank: int, attempt: int) -> Outgoing:
    """Answer a request for a server's shard of a checkpoint."""
    shard = writer.take(values_of(frame)["wait_seconds"])
    values = {"shard": None if shard is None else shard.values}
    return Outgoing(frame.sender, message(Kind.SHARD, rank, attempt, frame.number, values), 0)


def part_answer(pieces: Iterable[Piece], frame: Frame, rank: int, attempt: int) -> Outgoing:
    """Answer a request for one of the parts of a server's state, with their number."""
    all_parts = [part for piece in pieces for part in parts(piece)]
    number: int = values_of(frame)["part"]
    count = {"count": len(all_parts)}
    if number == len(all_parts):
        return Outgoing(frame.sender, message(Kind.WEIGHTS, rank, attempt, frame.number, count), 0)
    part = all_parts[number]
    answer = piece_message(Kind.WEIGHTS, rank, attempt, frame.number, part, count)
    return Outgoing(frame.sender, answer, part.view.nbytes)
