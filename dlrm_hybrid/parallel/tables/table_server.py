"""One table server: lookups and updates come in, rows go out.

Its `TableOrder` says which version of the tables answers a lookup, and when updates are applied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from dlrm_hybrid.compress.embedding.ends import HolderEnd, RowFormats
from dlrm_hybrid.compress.embedding.memory import Rows
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.table_rows import TableRows
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.tables.lookups import (
    AskedIds,
    ahead_of,
    asked_of,
    flights_of,
    held_by,
    message_of,
    number_section,
)
from dlrm_hybrid.parallel.tables.order import (
    Apply,
    BatchOf,
    PredictionOf,
    Question,
    SendRows,
    TableAction,
    TableOrder,
)
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.telemetry.spans import Span, SpanClock
from dlrm_hybrid.types import BatchNumber, DlrmError, Version
from dlrm_hybrid.wire.frame import EVALUATION, Frame, Kind
from dlrm_hybrid.wire.section import blamed

FLOAT_BYTES = 4


@final
class TableServer:
    """One table server without its receive loop.

    Args:
        topology: ranks and roles of the world.
        index: which server this is.
        rows: the rows that it owns.
        order: order of lookups and updates.
        formats: formats of rows and gradients on the wire.
        schedule: learning rate by step.
        attempt: how often the run has been restarted.
        clock: measures looking up and updating.

    Attributes:
        kinds: kinds of the frames that it handles.
    """

    kinds = (Kind.LOOKUP, Kind.UPDATE)

    def __init__(
        self,
        topology: Topology,
        index: int,
        rows: TableRows,
        *,
        order: TableOrder,
        formats: RowFormats,
        schedule: LrSchedule,
        attempt: int,
        clock: SpanClock,
    ) -> None:
        self._topology = topology
        self._rank = topology.table_server(index)
        self._rows = rows
        self._rows_F = np.array(rows.rows_F, np.int64)
        self._state, self._schedule, self._attempt = order, schedule, attempt
        self.held = held_by(index, rows.rows_F, rows.widths)
        self._index, self._format = index, formats.training
        self._ends = [self._make_end(trainer) for trainer in range(topology.trainers)]
        self._exact = formats.exact.holder(0, self.held)
        self._looking_up = clock.within(Span.EMBEDDING)
        # Questions that wait, each with the exponent for its rows; answers whose updates have not
        # come, updates that wait.
        self._asked: dict[Question, tuple[AskedIds, int]] = {}
        self._sent: dict[BatchOf, Outgoing] = {}
        self._gradients: dict[BatchOf, tuple[Rows, Tensor]] = {}
        self.restart(Version(0), {})

    @property
    def version(self) -> Version:
        """The newest version that has been made."""
        return self._state.version

    def pieces(self) -> list[Piece]:
        """Views of all that a checkpoint must hold."""
        return self._rows.pieces()

    def version_at(self, step: int) -> Version:
        """The version that a checkpoint of this step holds."""
        return self._state.version_at(step)

    def restart(self, version: Version, values: Mapping[str, Tensor]) -> None:
        """Start from tables of this version, with nothing under way.

        Args:
            version: batches of each trainer so far; with `ArrivalOrder` of all trainers together.
            values: `Tables.state_ahead` of the trainers, as far as a checkpoint holds them.
        """
        for trainer, end in enumerate(self._ends):
            end.load(values)
            for rows, read in flights_of(values, ahead_of(trainer, self._index), self.held):
                end.sent(rows, read)
        self._state = self._state.begin(self._topology.trainers, version)
        for table in (self._asked, self._sent, self._gradients):
            table.clear()

    def has_made(self, version: int, request: Mapping[str, Any]) -> bool:
        """Whether the tables are at the version of a request's `step`.

        Raises:
            DlrmError: they are past it.
        """
        due = self.version_at(request["step"])
        if self.version > due:
            raise DlrmError(
                f"rank {self._rank}: asked for the tables of step {request['step']}, which are at "
                f"version {self.version}"
            )
        return self.version == due

    def leave(self, rank: int) -> list[Outgoing]:
        """Forget what a trainer that is lost remembers: it comes again with nothing."""
        group = self._topology.interaction_group
        if rank in group:
            trainer = group.index(rank)
            self._ends[trainer] = self._make_end(trainer)
        return []

    def _make_end(self, trainer: int) -> HolderEnd:
        return self._format.holder(trainer, self.held)

    def handle(self, frame: Frame) -> list[Outgoing]:
        """Handle a LOOKUP or an UPDATE; returns the ROWS to send before the next call.

        Raises:
            DlrmError: the frame is not due or does not fit; names rank and batch.
        """
        group = self._topology.interaction_group
        what = f"{frame.kind.name.lower()} {frame.number} of rank {frame.sender}"
        if frame.sender not in group or frame.attempt != self._attempt:
            raise DlrmError(
                f"{what}, attempt {frame.attempt}: table servers answer ranks "
                f"{', '.join(map(str, group))} of attempt {self._attempt}"
            )
        of = BatchOf(group.index(frame.sender), BatchNumber(frame.number))
        actions = (
            self._take_update(of, frame, what)
            if frame.kind is Kind.UPDATE
            else self._take_lookup(of, frame, what)
        )
        with self._looking_up:
            return [outgoing for action in actions for outgoing in self._act(action)]

    def _take_lookup(self, of: BatchOf, frame: Frame, what: str) -> Sequence[TableAction]:
        question: Question = of
        if frame.microbatch == EVALUATION:
            question = PredictionOf(of.trainer, Version(frame.number))
        after, actions = self._state.on_question(question)
        if after is not self._state or actions:
            # Whatever else the trainer sends before its rows can be sent.
            exponent = self._ends[of.trainer].exponent
            self._asked[question] = asked_of(frame.sections, self._rows_F, what), exponent
        self._state = after
        return actions

    def _take_update(self, of: BatchOf, frame: Frame, what: str) -> Sequence[TableAction]:
        after, actions = self._state.on_update(of)
        if after is not self._state:
            if len(frame.sections) != 3:
                raise DlrmError(f"{what}: {len(frame.sections)} sections, expected 3")
            ids = asked_of(frame.sections[:2], self._rows_F, what).ids
            end = self._ends[of.trainer]
            with blamed(what):
                message = message_of(frame.sections[2], end.dtype)
                gradient_KD = torch.from_numpy(end.gradients(ids, message))
            self._gradients[of] = ids, gradient_KD
            self._sent.pop(of, None)
        self._state = after
        return actions

    def _act(self, action: TableAction) -> list[Outgoing]:
        if isinstance(action, Apply):
            gradients = [self._gradients.pop(update) for update in action.updates]
            self._rows.update(gradients, self._schedule.lr(action.step))
            return []
        if isinstance(action, SendRows):
            return [self._answer(question, action.is_kept) for question in action.questions]
        self._asked.pop(action.of)
        return [self._sent[action.of]]

    def _answer(self, question: Question, is_kept: bool) -> Outgoing:
        asked, exponent = self._asked.pop(question)
        is_prediction = isinstance(question, PredictionOf)
        end = self._exact if is_prediction else self._ends[question.trainer]
        values_KD = self._rows.look_up(asked.ids).numpy()
        message = end.rows(asked.ids, values_KD, exponent)
        frame = Frame(
            kind=Kind.ROWS,
            sender=self._rank,
            attempt=self._attempt,
            number=question.version if is_prediction else question.batch,
            microbatch=EVALUATION if is_prediction else 0,
            sections=(number_section(message, end.dtype),),
        )
        to = self._topology.interaction_group[question.trainer]
        dense_bytes = FLOAT_BYTES * self._rows.widths.mean_elements(asked.lookups)
        answer = Outgoing(to, frame, dense_bytes)
        if is_kept and isinstance(question, BatchOf):
            self._sent[question] = answer
        return answer
