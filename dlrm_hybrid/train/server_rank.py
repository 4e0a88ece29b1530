"""A server process, of weights or of tables: its answers, its phase and its shards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import final

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.model.tensors import Piece, in_groups, parts
from dlrm_hybrid.parallel.dense.server import Handle, ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import piece_message, reply, values_of
from dlrm_hybrid.parallel.tables.table_server import TableServer
from dlrm_hybrid.telemetry.rank_meter import WARMUP_STEPS
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.types import Group
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind


@final
@dataclass(slots=True, kw_only=True)
class ServerRank:
    """Handles all frames that come to a server rank.

    Attributes:
        server: owns the tensors.
        rank: rank of the server.
        switch: called with the phase of the next answers.
        writer: writes its shards of checkpoints.
        collect: handles contributions; None if there are no rounds.
        ahead: number of batches ahead that trainers request rows.
        elastic: whether trainers may be lost, each with its last counted push or update.
        lowered: first steps of lower learning rates; appended to.
    """

    server: ParameterServer | TableServer
    rank: int
    switch: Callable[[Phase], None]
    writer: ShardWriter
    collect: Handle | None = None
    ahead: int = 0
    elastic: bool = False
    lowered: list[int] = field(default_factory=list[int])
    _first: dict[int, int] = field(default_factory=dict[int, int])
    _waiting: list[Frame] = field(default_factory=list[Frame])

    def handlers(self) -> Mapping[Kind, Handle]:
        """What answers each kind of frame."""
        handlers: dict[Kind, Handle] = {
            **dict.fromkeys((Kind.FETCH, Kind.SAVE), self._ask),
            Kind.SHARD: self._shard,
            Kind.LEFT: self._left,
            Kind.LOWER: partial(lower, self.lowered),
            **dict.fromkeys(self.server.kinds, partial(self._serve, self.server.handle)),
        }
        if self.collect is not None:
            handlers[Kind.CONTRIBUTION] = partial(self._serve, self.collect)
        return handlers

    def _serve(self, handle: Handle, frame: Frame) -> Sequence[Outgoing]:
        self.switch(self._phase(frame))
        return [*handle(frame), *self._answers()]

    def _left(self, frame: Frame) -> Sequence[Outgoing]:
        return [*self.server.leave(frame.sender), *self._answers()]

    def _phase(self, frame: Frame) -> Phase:
        """The phase of a frame's worker; workers may differ in earlier pushes or updates."""
        if frame.kind is Kind.PULL:
            return Phase.CHECKPOINT
        if frame.microbatch == EVALUATION:
            return Phase.EVALUATE
        first, ahead = self._first.get(frame.sender, frame.number), self.ahead
        if frame.kind is not Kind.LOOKUP:
            self._first[frame.sender], ahead = first, 0
        is_warm = frame.number - ahead >= first + WARMUP_STEPS  # relative to the tick that asks
        return Phase.TRAIN if is_warm else Phase.WARMUP

    def _ask(self, frame: Frame) -> Sequence[Outgoing]:
        """Keep a request about the tensors until these have the version it names."""
        self._waiting.append(frame)
        return self._answers()

    def _answers(self) -> list[Outgoing]:
        if not self._waiting:
            return []
        ready = [frame for frame in self._waiting if self._is_ready(frame)]
        self._waiting = [frame for frame in self._waiting if frame not in ready]
        return [self._answer(frame) for frame in ready]

    def _is_ready(self, frame: Frame) -> bool:
        if frame.kind is Kind.SAVE and self.elastic:
            # All present workers had an answer after their last pushes, and trainers have settled;
            # a lost one's updates may be too few or, of batches given out again, too many.
            return True
        return self.server.has_made(frame.number, values_of(frame))

    def _answer(self, frame: Frame) -> Outgoing:
        self.switch(Phase.EVALUATE if frame.kind is Kind.FETCH else Phase.CHECKPOINT)
        if frame.kind is Kind.SAVE:
            return save_answer(self.writer, frame, self.rank, self.server.pieces())
        values = values_of(frame)
        if "part" in values:
            return self._part(values["part"], frame)
        assert isinstance(self.server, ParameterServer), "tables are fetched in parts"
        weights = self.server.weights(values["stage"])
        return reply(frame, Kind.WEIGHTS, self.rank, {}, weights)

    def _part(self, number: int, frame: Frame) -> Outgoing:
        """Answer a request for one of the parts of the server's state, with their number."""
        pieces = in_groups(self.server.pieces(), Group.DENSE, Group.EMBEDDINGS)
        all_parts = [part for piece in pieces for part in parts(piece)]
        count = {"count": len(all_parts)}
        if number == len(all_parts):
            return reply(frame, Kind.WEIGHTS, self.rank, count)
        part, of = all_parts[number], (self.rank, frame.attempt, frame.number)
        return Outgoing(
            frame.sender, piece_message(Kind.WEIGHTS, *of, part, count), part.view.nbytes
        )

    def _shard(self, frame: Frame) -> Sequence[Outgoing]:
        self.switch(Phase.CHECKPOINT)
        return [shard_answer(self.writer, frame, self.rank)]


def lower(lowered: list[int], frame: Frame) -> Sequence[Outgoing]:
    """Handle LOWER, which comes from several stages: add the first step of lower rates."""
    if frame.number not in lowered:
        lowered.append(frame.number)
    return ()


def save_answer(writer: ShardWriter, frame: Frame, rank: int, pieces: Iterable[Piece]) -> Outgoing:
    """Copy the pieces of a checkpoint, and answer the request for that."""
    writer.begin(values_of(frame)["step"], pieces)
    return reply(frame, Kind.COPIED, rank, {})


def shard_answer(writer: ShardWriter, frame: Frame, rank: int) -> Outgoing:
    """Answer a request for a rank's shard of a checkpoint."""
    shard = writer.take(values_of(frame)["wait_seconds"])
    return reply(frame, Kind.SHARD, rank, {"shard": None if shard is None else shard.values})
