"""The leader, server 0, where trainers do not wait for each other, or not for a lost one.

The leader gives out batches, and keeps count. A step is as many batches as there are trainers.
Trainers train at their own pace, or in rounds, and come to rest at steps where something is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from functools import partial
from typing import Any, final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.data.loader import LoaderState
from dlrm_hybrid.model.optimizer import LrSchedule
from dlrm_hybrid.model.tensors import Piece
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger, tensors_of, values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train.asynchronous.leases import (
    MOST_AT_ONCE,
    PASS,
    InTurns,
    Leases,
    OwnPace,
    Positions,
)
from dlrm_hybrid.train.asynchronous.order_log import OrderLog, Taken
from dlrm_hybrid.train.asynchronous.trainers import AHEAD, Order, Trainers
from dlrm_hybrid.train.engine import Engine, Holder, IsLost, Show, lost_since
from dlrm_hybrid.train.evaluation import EvaluatedRows, gathered_scores
from dlrm_hybrid.train.progress import SYNC_EVERY, Decision, Plan, Progress
from dlrm_hybrid.train.signals import PREEMPTION, StopRequest, obey
from dlrm_hybrid.types import DlrmError, ScoredPart, Version
from dlrm_hybrid.wire.frame import SAID_GOODBYE, Frame, Kind


class _LeavingError(Exception):
    """A trainer leaves in the middle of an evaluation."""


@final
@dataclass(slots=True, kw_only=True)
class LeaderRank(Engine, Holder):
    """The engine of the leader, server 0, whose workers follow its orders.

    Attributes:
        topology: ranks and roles of the world.
        server: server of this rank.
        plan: plan of the run.
        after: position of the next step's batches, from that of one; `Loader.after`.
        schedule: learning rate of the dense parameters, to report it.
        rows: rows to evaluate, by part.
        messenger: to the other ranks; its mailbox handles frames to servers, and reports.
        log: records the batches given out, except in rounds; None: no record.
        rule: says which batches are whose.
        stop: stop request of signals to this rank.
        elastic: whether trainers may leave and join.
        missed: called with rank and incarnation of a worker lost without a goodbye.
        threads: number per worker; a lease has so many times the batches.
        trainers: trainers that follow its orders.
    """

    topology: Topology
    server: ParameterServer
    plan: Plan
    after: Callable[[LoaderState], LoaderState]
    schedule: LrSchedule
    rows: Mapping[ScoredPart, EvaluatedRows]
    messenger: Messenger
    log: OrderLog | None
    rule: OwnPace | InTurns
    stop: StopRequest
    elastic: bool
    missed: Callable[[int, int], None]
    threads: int = 1
    trainers: Trainers = field(init=False)
    _leases: Leases = field(init=False)
    _positions: Positions = field(init=False)
    _met_step: int = 0
    _metrics: StepMetrics = StepMetrics()
    _end: Order | None = None
    _interval: Interval = Interval()
    _severity: int = 0

    def __post_init__(self) -> None:
        self.trainers = Trainers(self.topology, self.messenger)
        self._leases = Leases.begin((0,) * self.topology.trainers, self.rule)
        self._positions = Positions(self.after)

    @property
    @override
    def holder(self) -> Holder:
        return self

    def report(self, frame: Frame) -> Sequence[Outgoing]:
        """Handle a worker's REPORT of orders done; returns the frames to send now."""
        number = frame.sender // self.topology.stages
        values, current = values_of(frame), self.trainers[number].incarnation
        if values["incarnation"] < current:
            return []  # another worker of its trainer was lost, so it will be ended
        lost: list[Outgoing] = []
        if values["incarnation"] > current:  # an incarnation was lost before this rank noticed it
            lost = self._lose(number, values["incarnation"], has_left=False)
        trainer = self.trainers[number]
        if frame.number or not values["incarnation"]:
            self._note(frame.sender, number, values)
        (trainer.writing.add if values["writing"] else trainer.writing.discard)(frame.sender)
        self._heed(number, values["severity"])
        if frame.number > len(trainer.told):
            raise DlrmError(
                f"rank {frame.sender}: has done {frame.number} orders; trainer {number} has got "
                f"{len(trainer.told)}"
            )
        trainer.done[frame.sender] = frame.number
        # Other trainers may have waited for it.
        return [*lost, *self.trainers.unsent(number), *self._give_all()]

    def left(self, frame: Frame) -> Sequence[Outgoing]:
        """Handle the loss of a worker, and so of its trainer; others take over its batches."""
        self.messenger.mailbox.forget(frame.sender)
        trainer = frame.sender // self.topology.stages
        has_left = frame.round == SAID_GOODBYE
        if frame.number < self.trainers[trainer].incarnation or (
            has_left and self._end is not None
        ):
            return []  # its trainer is lost already, or was ordered to end
        if not has_left:
            self.missed(frame.sender, frame.number)
        return self._lose(trainer, frame.number + 1, has_left=has_left)

    @override
    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        """Wait until all batches of a step are done."""
        if step * self.topology.trainers == self._leases.limit:
            self._go_on(step, at)
        self.trainers.wait(lambda: self._leases.learned >= (step + 1) * self.topology.trainers)
        metrics, self._metrics = self._metrics, StepMetrics()
        return metrics, self._positions.of(step + 1)

    @override
    def meet(
        self, progress: Progress, plan: Plan, stop: StopRequest, is_late: bool
    ) -> tuple[Progress, Decision]:
        """Add the workers' reports; at rest, decide."""
        self._severity = severity = max(stop.severity, self._severity)
        if severity or is_late:
            self._leases = self._leases.soon()
        is_limit = progress.step * self.topology.trainers == self._leases.limit
        if is_limit:
            self._rest(progress.step)
        interval, self._interval = self._interval, Interval()
        rows = plan.samples_per_step * (progress.step - self._met_step)
        self._met_step = progress.step
        progress = progress.plus(replace(interval, sent_rows=rows))
        progress = replace(progress, batches=self._leases.done)
        return progress, Decision(severity, is_late) if is_limit else Decision()

    @override
    def evaluate(self, part: ScoredPart, stop: StopRequest, show: Show) -> BinaryScores:
        """Score as `Engine.evaluate`, while all present trainers are at rest.

        If a trainer is lost or leaves meanwhile, the others begin again.
        """
        scores, rows = None, self.rows[part]
        while scores is None:
            self._wait_for_all()
            trainers, is_lost = self._leases.present, lost_since(self.trainers.losses)
            order = {"do": "evaluate", "part": part.value, "trainers": trainers}
            self.trainers.command(order, trainers)
            workers = self.trainers.workers(trainers)
            with suppress(_LeavingError):
                scores = gathered_scores(
                    self.topology,
                    rows,
                    trainers,
                    partial(self._logits, is_lost),
                    partial(self._meet_evaluating, stop, show, len(rows.rows), workers, is_lost),
                )
        # A trainer that leaves now does so before a checkpoint needs its shards.
        self._wait_for_all()
        return scores

    def end(self) -> None:
        """Order all workers to end, also those that join later."""
        self._end = {"do": "end", "severity": self._severity}
        self.trainers.command(self._end, range(self.topology.trainers))

    @property
    @override
    def away(self) -> Sequence[int]:
        return self.trainers.workers(self._leases.away)

    @property
    @override
    def losses(self) -> Sequence[int]:
        return self.trainers.losses

    @override
    def departures(self) -> Mapping[str, Any]:
        """Counts of this attempt, as a restarted one begins with all trainers."""
        return {
            "lost_trainers": self.trainers.lost,
            "left_trainers": self.trainers.left,
            "redone_batches": self.trainers.redone,
        }

    @override
    def pieces(self) -> list[Piece]:
        return self.server.pieces()

    @override
    def settled(self) -> Version:
        """Version of the servers: pushes of all trainers, none of which is under way."""
        return Version(self._leases.learned)

    @override
    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        done = tuple(progress.batches_of(trainer) for trainer in range(self.topology.trainers))
        self._leases = Leases.begin(done, self.rule)
        self._met_step = progress.step
        self.server.restart(self._leases.given, values)

    def _note(self, rank: int, number: int, values: Mapping[str, Any]) -> None:
        interval = Interval(**values["interval"])
        metrics = StepMetrics(
            loss_sum=interval.loss_sum, correct=interval.correct, rows=interval.rows
        )
        # Metrics count once all workers of the trainer have done the batches.
        interval = replace(interval, loss_sum=0.0, correct=0, rows=0)
        self._interval = self._interval.plus(interval)
        trainer = self.trainers[number]
        trainer.note(rank, values["learned"], metrics)
        if len(trainer.learned) == self.topology.stages:
            by_all = min(trainer.learned.values())
            self._leases = self._leases.finish(number, by_all)
            self._metrics = self._metrics.plus(trainer.metrics_until(by_all))

    def _heed(self, number: int, severity: int) -> None:
        """Record a signal to a worker: at SIGTERM its trainer leaves, if trainers may leave.

        The supervisor forwards signals for the whole run to this rank before all workers.
        """
        if self.elastic and severity == PREEMPTION:
            self.trainers[number].is_leaving = True
        else:
            self._severity = max(self._severity, severity)

    def _may_leave(self, number: int) -> bool:
        """Whether a trainer is to leave now: it has begun, and no checkpoint waits for it."""
        stops = bool(self.stop.severity or self._severity) or self._end is not None
        return self.trainers[number].may_leave and not stops

    def _give(self, number: int, ahead: int = AHEAD) -> list[Outgoing]:
        """Order more batches, if any, for a trainer that has at most so many leases ahead."""
        frames: list[Outgoing] = []
        trainer = self.trainers[number]
        while trainer.can_have(ahead):
            if number in self._leases.away:
                if not trainer.told:
                    return [*frames, *self._let_join(number)]
                self._leases = self._leases.join(number)
            if self._may_leave(number):
                if not trainer.can_have(0):
                    return frames  # no worker may leave before another has reported its batches
                hands_over = isinstance(self.rule, OwnPace)
                order = {"do": "leave", "hands_over": hands_over}
                return [*frames, *self.trainers.tell(number, order)]
            self._leases, batches = self._leases.take(number, MOST_AT_ONCE * self.threads)
            if not batches:
                break
            if batches == (PASS,):
                frames += self.trainers.tell(number, {"do": "pass"})
                continue
            if self.log is not None and isinstance(self.rule, OwnPace):
                self.log.add(Taken(Kind.DECISION, number, batches[0], len(batches)))
            pairs = [divmod(batch, self.topology.trainers) for batch in batches]
            parts = [(*astuple(self._positions.of(step)), part) for step, part in pairs]
            frames += self.trainers.tell(number, {"do": "learn", "batches": parts})
        return frames

    def _let_join(self, number: int) -> list[Outgoing]:
        """Let a trainer join now if no other trains; else let all come to rest soon for it."""
        trainers = self.trainers
        if not self._leases.present and not any(trainers[n].told for n in self._leases.away):
            return trainers.tell(number, trainers[number].join)
        if (soon := self._leases.soon()).limit > self._leases.learned:
            self._leases = soon
        return []

    def _join(self) -> None:
        """At rest, let all waiting trainers join, unless they are lost meanwhile."""
        trainers, away = self.trainers, sorted(self._leases.away)
        joining = [n for n in away if not trainers[n].told and trainers[n].can_have(0)]
        for number in joining:
            trainers.send(trainers.tell(number, trainers[number].join))
        trainers.wait(lambda: not any(n in self._leases.away and trainers[n].told for n in joining))

    def _give_all(self) -> list[Outgoing]:
        return [frame for trainer in range(self.topology.trainers) for frame in self._give(trainer)]

    def _lose(self, number: int, incarnation: int, *, has_left: bool) -> list[Outgoing]:
        """Replace a lost trainer by its next incarnation; returns the orders for the others.

        Servers have seen no larger number of it than those of the batches it had under way, and one
        more for its residual. So it continues one batch per thread after these: to table servers a
        gap marks another incarnation. At the end of the run it is only ordered to end.
        """
        under_way, done = self._leases.under_way[number], self._leases.done[number]
        at = done + self.trainers[number].skipped + len(under_way) + 2 * self.threads - 1
        self._leases = self._leases.lose(number)
        successor = self.trainers.lose(
            number,
            incarnation,
            redone=len(under_way),
            skipped=at - done,
            join={"do": "join", "at": at},
            left=has_left,
        )
        if self._end is not None:
            successor.told.append(self._end)
        elif isinstance(self.rule, OwnPace):  # none will wait for it
            successor.told.append(successor.join)
        return self._give_all()

    def _wait_for_all(self) -> None:
        """Wait until all present trainers have done their orders."""
        self.trainers.wait(lambda: self.trainers.are_at_rest(self._leases.present))

    def _rest(self, step: int) -> None:
        """Wait until all have trained on their batches, and all they sent has arrived."""
        self._wait_for_all()
        # A trainer that joins meanwhile has just pulled everything, and sent nothing.
        self.trainers.command({"do": "settle"}, self._leases.present)
        self._wait_for_all()
        if self.log is not None:
            self.log.add(Taken(Kind.SAVE, self.messenger.rank, step))

    def _go_on(self, step: int, at: LoaderState) -> None:
        """Give out batches up to the next step where something is due."""
        self._positions.begin(step, at)
        self._join()
        self._leases = self._leases.until(self.plan.next_rest(step) * self.topology.trainers)
        for ahead in range(AHEAD + 1):  # each trainer gets a first lease before any gets a second
            for trainer in range(self.topology.trainers):
                self.trainers.send(self._give(trainer, ahead))

    def _logits(self, is_lost: IsLost, rank: int, number: int) -> Tensor | None:
        """Receive a rank's logits; None if it was lost."""
        frame = self.messenger.receive_unless(rank, Kind.LOGITS, number, partial(is_lost, rank))
        return None if frame is None else tensors_of(frame)["logits"]

    def _meet_evaluating(
        self,
        stop: StopRequest,
        show: Show,
        rows: int,
        workers: Sequence[int],
        is_lost: IsLost,
        number: int,
        done_rows: int,
    ) -> None:
        """Stop all together, before the group of batches of this number, if one of them must."""
        show(done_rows, rows)
        if number % SYNC_EVERY:
            return
        for rank in workers:
            request = self.messenger.receive_unless(
                rank, Kind.STOP_REQUEST, number, partial(is_lost, rank)
            )
            if request is not None:
                self._heed(rank // self.topology.stages, values_of(request)["severity"])
        self._severity = severity = max(stop.severity, self._severity)
        one_leaves = any(map(self._may_leave, range(self.topology.trainers)))
        # Workers stop here in either case, and wait for their next order.
        decision = {"severity": PREEMPTION if one_leaves else severity}
        for rank in workers:
            if not is_lost(rank):
                self.messenger.send(rank, Kind.STOP_DECISION, number, decision)
        obey(severity)
        if one_leaves:
            raise _LeavingError
