"""The leader, server 0, where trainers do not wait for each other, or not for a lost one.

It gives out batches, and keeps count. A step is as many batches as there are trainers. Trainers
train at their own pace, or in rounds, and come to rest at steps where something is due.
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
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger, tensors_of, values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train.asynchronous.attendance import Attendance, LossesSince
from dlrm_hybrid.train.asynchronous.dispatch import Dispatch
from dlrm_hybrid.train.asynchronous.leases import MOST_AT_ONCE, Leases, Positions
from dlrm_hybrid.train.asynchronous.order_log import OrderLog, Taken
from dlrm_hybrid.train.asynchronous.orders import AHEAD, Order, Orders
from dlrm_hybrid.train.asynchronous.turns import PASS, Turns
from dlrm_hybrid.train.engine import Engine, Holder, Show
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
        server: that of this rank.
        plan: that of the run.
        after: position of the next step's batches, from that of one; `Loader.after`.
        schedule: learning rate of the dense parameters, to report it.
        rows: those to evaluate, by part.
        messenger: to the other ranks; its mailbox handles frames to servers, and reports.
        log: records the batches given out, except in rounds; None keeps no record.
        begin: makes the schedule of batches, given the number that each trainer has done.
        stop: stop request of signals to this rank.
        elastic: whether trainers may leave and join.
        missed: called with rank and incarnation of a worker lost without a goodbye.
        threads: number per worker; a lease has so many times the batches.
        attendance: of the trainers.
    """

    topology: Topology
    server: ParameterServer
    plan: Plan
    after: Callable[[LoaderState], LoaderState]
    schedule: LrSchedule
    rows: Mapping[ScoredPart, EvaluatedRows]
    messenger: Messenger
    log: OrderLog | None
    begin: Callable[[tuple[int, ...]], Leases | Turns]
    stop: StopRequest
    elastic: bool
    missed: Callable[[int, int], None]
    threads: int = 1
    attendance: Attendance = field(init=False)
    _leases: Leases | Turns = field(init=False)
    _dispatch: Dispatch = field(init=False)
    _orders: list[Orders] = field(init=False)
    _positions: Positions = field(init=False)
    _met_step: int = 0
    _metrics: StepMetrics = StepMetrics()
    _end: Order | None = None
    _interval: Interval = Interval()
    _severity: int = 0

    def __post_init__(self) -> None:
        trainers = self.topology.trainers
        self.attendance = Attendance(trainers, self.topology.stages)
        self._leases = self.begin((0,) * trainers)
        self._positions = Positions(self.after)
        self._dispatch = Dispatch(self.topology, self.messenger, self.attendance)
        self._orders = self._dispatch.orders

    @property
    @override
    def holder(self) -> Holder:
        return self

    def report(self, frame: Frame) -> Sequence[Outgoing]:
        """Handle a worker's REPORT of orders done; returns the frames to send now."""
        trainer = frame.sender // self.topology.stages
        values, known = values_of(frame), self.attendance.incarnations[trainer]
        if values["incarnation"] < known:
            return []  # another worker of its trainer was lost, so it will be ended
        lost: list[Outgoing] = []
        if values["incarnation"] > known:  # an incarnation was lost before this rank noticed it
            lost = self._lose(trainer, values["incarnation"], has_left=False)
        orders = self._orders[trainer]
        if frame.number or not values["incarnation"]:
            self._note(frame.sender, trainer, values)
        (orders.writing.add if values["writing"] else orders.writing.discard)(frame.sender)
        self._heed(trainer, values["severity"])
        if frame.number > len(orders.told):
            raise DlrmError(
                f"rank {frame.sender}: has done {frame.number} orders; trainer {trainer} has got "
                f"{len(orders.told)}"
            )
        orders.done[frame.sender] = frame.number
        # Other trainers may have waited for it.
        return [*lost, *self._dispatch.unsent(trainer), *self._give_all()]

    def left(self, frame: Frame) -> Sequence[Outgoing]:
        """Handle the loss of a worker, and so of its trainer; others take over its batches."""
        self.messenger.mailbox.forget(frame.sender)
        trainer = frame.sender // self.topology.stages
        has_left = frame.round == SAID_GOODBYE
        if frame.number < self.attendance.incarnations[trainer] or (
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
        self._dispatch.wait(lambda: self._leases.learned >= (step + 1) * self.topology.trainers)
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
            self._dispatch.wait_for_all()
            trainers, since = self.attendance.present, LossesSince.now(self.attendance.losses)
            order = {"do": "evaluate", "part": part.value, "trainers": trainers}
            self._dispatch.command(order, trainers)
            workers = self.attendance.workers(trainers)
            with suppress(_LeavingError):
                scores = gathered_scores(
                    self.topology,
                    rows,
                    trainers,
                    partial(self._logits, since),
                    partial(self._meet_evaluating, stop, show, len(rows.rows), workers, since),
                )
        # A trainer that leaves now does so before a checkpoint needs its shards.
        self._dispatch.wait_for_all()
        return scores

    def end(self) -> None:
        """Order all workers to end, also those that join later."""
        self._end = {"do": "end", "severity": self._severity}
        self._dispatch.command(self._end, range(self.topology.trainers))

    @property
    @override
    def away(self) -> Sequence[int]:
        return self.attendance.away_workers()

    @property
    @override
    def losses(self) -> Sequence[int]:
        return self.attendance.losses

    @override
    def departures(self) -> Mapping[str, Any]:
        """Counts of this attempt, as a restarted one begins with all trainers."""
        attendance = self.attendance
        return {
            "lost_trainers": attendance.lost,
            "left_trainers": attendance.left,
            "redone_batches": attendance.redone,
        }

    @override
    def pieces(self) -> list[Piece]:
        return full_pieces(self.server.tensors())

    @override
    def settled(self) -> Version:
        """Version of the servers: pushes of all trainers, none of which is under way."""
        return Version(self._leases.learned)

    @override
    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        trainers = range(self.topology.trainers)
        self._leases = self.begin(tuple(progress.batches_of(one) for one in trainers))
        self._met_step = progress.step
        self.server.restart(self._leases.given, values)

    def _note(self, rank: int, trainer: int, values: Mapping[str, Any]) -> None:
        interval = Interval(**values["interval"])
        metrics = StepMetrics(
            loss_sum=interval.loss_sum, correct=interval.correct, rows=interval.rows
        )
        # Metrics count once all workers of the trainer have done the batches.
        interval = replace(interval, loss_sum=0.0, correct=0, rows=0)
        self._interval = self._interval.plus(interval)
        orders = self._orders[trainer]
        orders.note(rank, values["learned"], metrics)
        if len(orders.learned) == self.topology.stages:
            by_all = min(orders.learned.values())
            self._leases = self._leases.finish(trainer, by_all)
            self._metrics = self._metrics.plus(orders.metrics_until(by_all))

    def _heed(self, trainer: int, severity: int) -> None:
        """Record a signal to a worker: at SIGTERM its trainer leaves, if trainers may leave.

        The supervisor forwards signals for the whole run to this rank before all workers.
        """
        if self.elastic and severity == PREEMPTION:
            self.attendance.leaving.add(trainer)
        else:
            self._severity = max(self._severity, severity)

    def _may_leave(self, trainer: int) -> bool:
        """Whether a trainer is to leave now: it has begun, and no checkpoint waits for it."""
        stops = bool(self.stop.severity or self._severity) or self._end is not None
        return trainer in self.attendance.leaving and self._orders[trainer].may_leave and not stops

    def _give(self, trainer: int, ahead: int = AHEAD) -> list[Outgoing]:
        """Order more batches, if any, for a trainer that has at most so many leases ahead."""
        given: list[Outgoing] = []
        orders = self._orders[trainer]
        while orders.can_have(self.topology.stages, ahead):
            if trainer in self.attendance.away:
                if not orders.told:
                    return [*given, *self._let_join(trainer)]
                self.attendance.away.discard(trainer)
                self._leases = self._leases.join(trainer)
            if self._may_leave(trainer):
                if not orders.can_have(self.topology.stages, 0):
                    return given  # no worker may leave before another has reported its batches
                hands_over = not isinstance(self._leases, Turns)
                order = {"do": "leave", "hands_over": hands_over}
                return [*given, *self._dispatch.tell(trainer, order)]
            self._leases, batches = self._leases.take(trainer, MOST_AT_ONCE * self.threads)
            if not batches:
                break
            if batches == (PASS,):
                given += self._dispatch.tell(trainer, {"do": "pass"})
                continue
            if self.log is not None and isinstance(self._leases, Leases):
                self.log.add(Taken(Kind.DECISION, trainer, batches[0], len(batches)))
            of = [divmod(batch, self.topology.trainers) for batch in batches]
            parts = [(*astuple(self._positions.of(step)), part) for step, part in of]
            given += self._dispatch.tell(trainer, {"do": "learn", "batches": parts})
        return given

    def _let_join(self, trainer: int) -> list[Outgoing]:
        """Let a trainer that joins at a rest do so now if none trains; else make a rest due."""
        if not self.attendance.present and not any(
            self._orders[one].told for one in self.attendance.away
        ):
            return self._dispatch.tell(trainer, self._orders[trainer].join)
        if (soon := self._leases.soon()).limit > self._leases.learned:
            self._leases = soon
        return []

    def _join(self) -> None:
        """At rest, let all waiting trainers join, unless they are lost meanwhile."""
        orders, away, stages = self._orders, self.attendance.away, self.topology.stages
        joining = [one for one in away if not orders[one].told and orders[one].can_have(stages, 0)]
        for trainer in joining:
            self._dispatch.send(self._dispatch.tell(trainer, self._orders[trainer].join))
        self._dispatch.wait(lambda: not any(one in away and orders[one].told for one in joining))

    def _give_all(self) -> list[Outgoing]:
        return [one for trainer in range(self.topology.trainers) for one in self._give(trainer)]

    def _lose(self, trainer: int, incarnation: int, *, has_left: bool) -> list[Outgoing]:
        """Replace a lost trainer by its next incarnation; returns the orders for the others.

        Servers have seen no larger number of it than those of the batches it had under way, and one
        more for its residual. So it continues one batch per thread after these: to table servers a
        gap marks another incarnation. At the end of the run it is only ordered to end.
        """
        under_way, done = self._leases.under_way[trainer], self._leases.done[trainer]
        at = done + self._orders[trainer].skipped + len(under_way) + 2 * self.threads - 1
        self._leases = self._leases.lose(trainer)
        self.attendance.lose(trainer, incarnation, len(under_way), has_left=has_left)
        orders = self._orders[trainer] = Orders(skipped=at - done, join={"do": "join", "at": at})
        if self._end is not None:
            orders.told.append(self._end)
        elif not isinstance(self._leases, Turns):  # none will wait for it
            orders.told.append(orders.join)
        return self._give_all()

    def _rest(self, step: int) -> None:
        """Wait until all have trained on what they were given, and it has arrived everywhere."""
        self._dispatch.wait_for_all()
        # A trainer that joins meanwhile has just pulled everything, and sent nothing.
        self._dispatch.command({"do": "settle"}, self.attendance.present)
        self._dispatch.wait_for_all()
        if self.log is not None:
            self.log.add(Taken(Kind.SAVE, self.messenger.rank, step))

    def _go_on(self, step: int, at: LoaderState) -> None:
        """Give out batches up to the next step where something is due."""
        self._positions.begin(step, at)
        self._join()
        self._leases = self._leases.until(self.plan.next_rest(step) * self.topology.trainers)
        for ahead in range(AHEAD + 1):  # each trainer gets a first lease before any gets a second
            for trainer in range(self.topology.trainers):
                self._dispatch.send(self._give(trainer, ahead))

    def _logits(self, since: LossesSince, rank: int, number: int) -> Tensor | None:
        """Receive a rank's logits; None if it was lost."""
        frame = self.messenger.receive_unless(
            rank, Kind.LOGITS, number, partial(since.is_lost, rank)
        )
        return None if frame is None else tensors_of(frame)["logits"]

    def _meet_evaluating(
        self,
        stop: StopRequest,
        show: Show,
        rows: int,
        workers: Sequence[int],
        since: LossesSince,
        number: int,
        done_rows: int,
    ) -> None:
        """Stop all together, before the group of batches of this number, if one of them must."""
        show(done_rows, rows)
        if number % SYNC_EVERY:
            return
        for rank in workers:
            asked = self.messenger.receive_unless(
                rank, Kind.STOP_REQUEST, number, partial(since.is_lost, rank)
            )
            if asked is not None:
                self._heed(rank // self.topology.stages, values_of(asked)["severity"])
        self._severity = severity = max(stop.severity, self._severity)
        one_leaves = any(map(self._may_leave, self.attendance.leaving))
        # Workers stop here in either case, and wait for their next order.
        decision = {"severity": PREEMPTION if one_leaves else severity}
        for rank in workers:
            if not since.is_lost(rank):
                self.messenger.send(rank, Kind.STOP_DECISION, number, decision)
        obey(severity)
        if one_leaves:
            raise _LeavingError
