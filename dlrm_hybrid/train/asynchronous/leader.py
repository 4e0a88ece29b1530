"""Server 0 leads where trainers do not wait for each other: it gives out batches, and keeps count.

A step is as many batches as there are trainers. Between two steps at which something is due all
trainers learn at their own pace; there they come to rest, and go on when it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, final

from torch import Tensor

from dlrm_hybrid.data.loader import LoaderState
from dlrm_hybrid.model.optimizer import Schedule
from dlrm_hybrid.model.tensors import Piece, full_pieces
from dlrm_hybrid.parallel.dense.server import ParameterServer
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import Messenger, message, values_of
from dlrm_hybrid.parallel.topology import Topology
from dlrm_hybrid.parallel.worker import StepMetrics
from dlrm_hybrid.telemetry.metrics import BinaryScores
from dlrm_hybrid.telemetry.rank_meter import Interval
from dlrm_hybrid.train.asynchronous.leases import Leases
from dlrm_hybrid.train.asynchronous.order_log import OrderLog, Taken
from dlrm_hybrid.train.evaluation import TestPart, gathered_scores
from dlrm_hybrid.train.progress import SYNC_EVERY, Decision, Plan, Progress
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.types import DeadlineError, DlrmError, Version
from dlrm_hybrid.wire.frame import Frame, Kind

Order = Mapping[str, Any]


@final
@dataclass(slots=True)
class _Orders:
    """What one trainer has been told, and which of its workers ask for more.

    Attributes:
        told: its orders; all of its workers are given the same ones.
        waiting: workers that ask for the order after these.
        learned: of each of its workers, batches since the run began.
    """

    told: list[Order] = field(default_factory=list[Order])
    waiting: list[int] = field(default_factory=list[int])
    learned: dict[int, int] = field(default_factory=dict[int, int])


@final
@dataclass(slots=True, kw_only=True)
class LeaderRank:
    """The functions of `Parts` for the server that leads.

    Attributes:
        topology: of the world.
        server: of this rank.
        plan: of the run.
        after: gives the position of the next step's batches from one's; `Loader.after`.
        schedule: learning rate of the dense parameters, to report it.
        test: the rows to evaluate.
        messenger: to the other ranks; its mailbox answers what comes to servers, and reports.
        log: gets the batches that are given out; None keeps no record.
    """

    topology: Topology
    server: ParameterServer
    plan: Plan
    after: Callable[[LoaderState], LoaderState]
    schedule: Schedule
    test: TestPart
    messenger: Messenger
    log: OrderLog | None
    _leases: Leases = field(init=False)
    _orders: list[_Orders] = field(init=False)
    _at: list[LoaderState] = field(default_factory=list[LoaderState])
    _first: int = 0
    _met_step: int = 0
    _metrics: StepMetrics = StepMetrics(loss_sum=0.0, correct=0, rows=0)
    _interval: Interval = Interval()
    _severity: int = 0

    def __post_init__(self) -> None:
        trainers = self.topology.trainers
        self._leases = Leases.begin((0,) * trainers)
        self._orders = [_Orders() for _ in range(trainers)]

    @property
    def leader(self) -> int:
        """This rank."""
        return self.messenger.rank

    @property
    def leads(self) -> bool:
        """Whether this process leads."""
        return True

    @property
    def looking_up(self) -> Sequence[int]:
        """The trainers that look up rows in this process: none."""
        return ()

    def report(self, frame: Frame) -> Sequence[Outgoing]:
        """Take what a worker says that asks for an order; the orders that can be given now."""
        trainer = frame.sender // self.topology.stages
        orders, values = self._orders[trainer], values_of(frame)
        self._note(frame.sender, trainer, values)
        if frame.number > len(orders.told):
            raise DlrmError(
                f"rank {frame.sender}: asks for order {frame.number}; trainer {trainer} has got "
                f"{len(orders.told)}"
            )
        if frame.number < len(orders.told):
            return [self._answer(frame.sender, frame.number, orders)]
        orders.waiting.append(frame.sender)
        return self._give(trainer)

    def make_step(self, step: int, at: LoaderState) -> tuple[StepMetrics, LoaderState]:
        """Wait until all batches of a step are learned; see `loop.Parts.make_step`."""
        if step * self.topology.trainers == self._leases.limit:
            self._go_on(step, at)
        self._wait(lambda: self._leases.learned >= (step + 1) * self.topology.trainers)
        metrics, self._metrics = self._metrics, StepMetrics(loss_sum=0.0, correct=0, rows=0)
        return metrics, self._position(step + 1)

    def meet(
        self, progress: Progress, plan: Plan, stop: StopRequest, is_late: bool
    ) -> tuple[Progress, Decision]:
        """Add what workers have told; where all are at rest, decide. See `loop.Parts.meet`."""
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

    def evaluate(self, stop: StopRequest, show: Callable[[int], None]) -> BinaryScores:
        """Scores of the weights on the test part; all are at rest.

        Args:
            stop: stop request of signals.
            show: called now and then with the rows done.

        Raises:
            PreemptedError, InterruptedRunError: between the same batches as all workers.
        """
        self._command({"do": "evaluate"})

        def meet(number: int, done_rows: int) -> None:
            show(done_rows)
            if number % SYNC_EVERY == 0:
                self._meet_evaluating(number, stop)

        return gathered_scores(self.topology, self.messenger, self.test, meet)

    def end(self) -> None:
        """Send all workers home."""
        self._command({"do": "end", "severity": self._severity})

    def pieces(self) -> list[Piece]:
        """What a checkpoint must hold of this rank."""
        return full_pieces(self.server.tensors())

    def settled(self) -> Version:
        """Of the servers: pushes of all trainers, none of which is under way."""
        return Version(self._leases.learned)

    def restart(self, progress: Progress, values: Mapping[str, Tensor]) -> None:
        """Go on from the tensors of a checkpoint."""
        trainers = range(self.topology.trainers)
        self._leases = Leases.begin(tuple(progress.batches_of(one) for one in trainers))
        self._met_step = progress.step
        self.server.restart(self._leases.given, values)

    def _note(self, rank: int, trainer: int, values: Mapping[str, Any]) -> None:
        """Take over what a worker has measured."""
        self._severity = max(self._severity, values["severity"])
        self._interval = self._interval.plus(Interval(**values["interval"]))
        self._metrics = self._metrics.plus(StepMetrics(**values["metrics"]))
        learned = self._orders[trainer].learned
        learned[rank] = values["learned"]
        if len(learned) == self.topology.stages:
            self._leases = self._leases.finish(trainer, min(learned.values()))

    def _give(self, trainer: int) -> list[Outgoing]:
        """More batches for a trainer all of whose workers ask for them, if there are any."""
        orders = self._orders[trainer]
        if len(orders.waiting) < self.topology.stages:
            return []
        self._leases, batches = self._leases.take(trainer)
        if not batches:
            return []
        if self.log is not None:
            self.log.add(Taken(Kind.DECISION, trainer, batches[0], len(batches)))
        of = [divmod(batch, self.topology.trainers) for batch in batches]
        parts = [(*astuple(self._position(step)), part) for step, part in of]
        return self._tell(trainer, {"do": "learn", "batches": parts})

    def _tell(self, trainer: int, order: Order) -> list[Outgoing]:
        orders = self._orders[trainer]
        orders.told.append(order)
        waiting, orders.waiting = orders.waiting, []
        return [self._answer(rank, len(orders.told) - 1, orders) for rank in waiting]

    def _answer(self, rank: int, number: int, orders: _Orders) -> Outgoing:
        messenger = self.messenger
        frame = message(
            Kind.DECISION, messenger.rank, messenger.attempt, number, orders.told[number]
        )
        return Outgoing(rank, frame, 0)

    def _command(self, order: Order) -> None:
        """Tell all trainers the same; they are at rest."""
        for trainer in range(self.topology.trainers):
            self._send(self._tell(trainer, order))

    def _rest(self, step: int) -> None:
        """Wait until all have learned what they were given, and it has arrived everywhere."""
        self._wait(self._all_wait)
        self._command({"do": "settle"})
        self._wait(self._all_wait)
        if self.log is not None:
            self.log.add(Taken(Kind.SAVE, self.leader, step))

    def _go_on(self, step: int, at: LoaderState) -> None:
        """Give out batches up to the next step at which something is due."""
        self._at, self._first = [at], step
        self._leases = self._leases.until(self.plan.next_rest(step) * self.topology.trainers)
        for trainer in range(self.topology.trainers):
            self._send(self._give(trainer))

    def _send(self, several: Sequence[Outgoing]) -> None:
        for outgoing in several:
            self.messenger.channel.send(*outgoing)

    def _position(self, step: int) -> LoaderState:
        """Where the batches of a step begin; of steps since all were at rest."""
        while len(self._at) <= step - self._first:
            self._at.append(self.after(self._at[-1]))
        return self._at[step - self._first]

    def _all_wait(self) -> bool:
        return all(len(one.waiting) == self.topology.stages for one in self._orders)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        patience_seconds = self.messenger.patience_seconds
        try:
            self.messenger.mailbox.wait_until(is_done, patience_seconds)
        except DeadlineError:
            stages, orders = self.topology.stages, self._orders
            workers = range(self.topology.num_workers)
            busy = [rank for rank in workers if rank not in orders[rank // stages].waiting]
            names = ", ".join(f"{self.topology.name(rank)} (rank {rank})" for rank in busy)
            raise DeadlineError(
                f"rank {self.leader}: nobody has said anything for {patience_seconds:g} s; batches "
                f"are with {names}",
                busy,
            ) from None

    def _meet_evaluating(self, number: int, stop: StopRequest) -> None:
        """Stop all together, before the group of batches with this number, if one of them must."""
        workers = range(self.topology.num_workers)
        asked = [self.messenger.receive(rank, Kind.STOP_REQUEST, number) for rank in workers]
        severity = max(stop.severity, self._severity, *(one["severity"] for one in asked))
        self._severity = severity
        for rank in workers:
            self.messenger.send(rank, Kind.STOP_DECISION, number, {"severity": severity})
        obey(severity)
