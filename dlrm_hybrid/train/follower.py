"""A follower: a worker that carries out the orders of its driver, and reports on each.

The driver is in the leader of a run, or it is the program of a world. An order is a frame of the
kind DECISION whose values say what to `do`; a report is one of the kind REPORT, whose number is
that of the orders done. An order to learn names the positions of its batches, or brings a batch
along.

A follower takes the next batches before it is done with the last ones, where their orders have
arrived. Its threads, if it has several, train on them at the same time.

Messages over the link to a leader:

it sends:      how many orders it has done, with metrics            REPORT
it receives:   orders to train on batches, to evaluate, to end      DECISION
               in lock-step, to lower rates and to empty the
               pipeline; else to pass, to settle, to leave after
               a signal to its trainer, and first, after a
               restart, to join at a batch
while waiting: copies what a checkpoint must hold, reports whether  SAVE, COPIED;
               that is written                                      SHARD
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, Protocol, final

from torch import Tensor
from typing_extensions import override

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.mailbox import Mailbox, Receive, SharedMailbox
from dlrm_hybrid.data.loader import Batch, LoaderState, ReadAhead
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.server import IDLE_SECONDS, HandlerTable
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.finite import check_loss
from dlrm_hybrid.parallel.messages import values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.rank_meter import Interval, RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.asynchronous.crew import Crew
from dlrm_hybrid.train.server_rank import save_answer, shard_answer
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import DlrmError, InterruptedRunError, PreemptedError, ScoredPart
from dlrm_hybrid.wire.frame import Frame, Kind

LEARN = "learn"


class Order(NamedTuple):
    """An order: the values of its frame, and the frame, which may hold tensors."""

    values: Mapping[str, Any]
    frame: Frame


class Answer(NamedTuple):
    """A worker's report of an order that it has done."""

    metrics: StepMetrics = StepMetrics()
    value: Any = None
    tensors: Mapping[str, Tensor] = {}  # noqa: RUF012 - nobody writes to it


class Due(NamedTuple):
    """A batch to train on.

    Attributes:
        batch: its rows.
        is_last: whether it is the last of its order.
        coming: batches of later orders that were read ahead.
    """

    batch: Batch
    is_last: bool
    coming: Sequence[Batch] = ()


Act = Callable[[Order], Answer | None]
"""Carries out an order; None if it was the last one."""


class Link(Protocol):
    """A worker's end of the link to its driver, and its acts beside training."""

    def acts(self) -> Mapping[str, Act]:
        """Acts of the worker beside training, by name."""
        ...

    def read(self, order: Order) -> Iterator[Due]:
        """Read the batches of an order to train."""
        ...

    def check(self, step: int, metrics: StepMetrics) -> None:
        """Check the metrics of a step, or of batches in flight; by default the driver does it."""

    def take(self) -> Frame:
        """Wait for the next order."""
        ...

    def take_now(self) -> Frame | None:
        """The next order if it has arrived."""
        ...

    def report(self, done: int, answer: Answer) -> None:
        """Report that so many orders are done, and the answer to the last one."""
        ...


@final
@dataclass(slots=True, kw_only=True)
class Follower:
    """A worker that its driver keeps busy.

    Attributes:
        rank: the worker.
        link: link to the driver.
        meter: meter of the process.
        ahead: number of batches of other orders whose rows are prefetched from the tables.
        crew: threads of the worker; None if it has one.
    """

    rank: WorkerRank
    link: Link
    meter: RankMeter
    ahead: int = 0
    crew: Crew | None = None
    _reading: Iterator[Due] = field(default_factory=lambda: iter(()))
    _ends: deque[bool] = field(default_factory=deque[bool])
    _metrics: StepMetrics = StepMetrics()
    _done: int = 0
    _held: Order | None = None

    def run(self) -> None:
        """Carry out orders until an act was the last one; raises what acts raise."""
        acts: Mapping[str, Act] = {"drain": self._drain, **self.link.acts()}
        self.link.report(0, Answer())
        while True:
            order = self._order()
            do = order.values["do"]
            if do == LEARN:
                self._learn(order)
                continue
            if do not in acts:
                raise DlrmError(f"rank {self.rank.messenger.rank}: told to do {do!r}")
            answer = acts[do](order)
            if answer is None:
                return
            self._finish(answer)

    def _drain(self, order: Order) -> Answer:
        metrics = self.rank.drain() or StepMetrics()
        self.link.check(self.rank.step, metrics)
        return Answer(metrics)

    def _finish(self, answer: Answer) -> None:
        self._done += 1
        self.link.report(self._done, answer)

    def _learn(self, order: Order) -> None:
        """Train on these batches, and on those of orders that arrive meanwhile.

        Rows are prefetched across the ends of orders as long as batches are there.
        """
        rank, window = self.rank, deque[Due]()
        self._reading = self.link.read(order)
        if self.crew is not None:
            self.crew.learn(rank.step, self._next_batch, self._learned_by_thread)
            return
        while True:
            while len(window) <= self.ahead and (due := self._next_due()) is not None:
                window.append(due)
            if not window:
                return
            batch, _, coming = window.popleft()
            metrics = rank.learn(batch, [*(due.batch for due in window), *coming])
            self.link.check(rank.step - 1, metrics)
            self._learned(metrics)

    def _next_batch(self) -> Batch | None:
        due = self._next_due()
        return None if due is None else due.batch

    def _next_due(self) -> Due | None:
        """Read the next batch of the orders that have arrived."""
        while (due := next(self._reading, None)) is None:
            lease = self._next_lease()
            if lease is None:
                return None
            self._reading = self.link.read(lease)
        self._ends.append(due.is_last)
        return due

    def _learned_by_thread(self, metrics: StepMetrics) -> None:
        self.rank.step += 1
        self._learned(metrics)

    def _learned(self, metrics: StepMetrics) -> None:
        """Report if the order of the batch read first is done."""
        self.meter.step_done()
        self._metrics = self._metrics.plus(metrics)
        if self._ends.popleft():
            metrics, self._metrics = self._metrics, StepMetrics()
            self._finish(Answer(metrics))

    def _order(self) -> Order:
        """Wait for the next order."""
        order, self._held = self._held, None
        order = order or _order_in(self.link.take())
        self.meter.train()  # until an act, or a handler while it waits, begins another phase
        return order

    def _next_lease(self) -> Order | None:
        """The next order if it has arrived and is to train."""
        if self._held is None:
            frame = self.link.take_now()
            if frame is None:
                return None
            self._held = _order_in(frame)
        return self._order() if self._held.values["do"] == LEARN else None


def _order_in(frame: Frame) -> Order:
    return Order(values_of(frame), frame)


ReadPart = Callable[[LoaderState, int], Batch]
"""`Loader.part`."""


def read_lease(part: ReadPart, order: Order) -> Iterator[Due]:
    """Read the batches of an order that names the position and the trainer of each."""
    batches = order.values["batches"]
    for number, (*at, trainer) in enumerate(batches, start=1):
        yield Due(part(LoaderState(*at), trainer), is_last=number == len(batches))


def read_steps(read: ReadAhead, order: Order) -> Iterator[Due]:
    """Read the batches of an order to make so many steps from a position."""
    at, steps = LoaderState(*order.values["at"]), order.values["steps"]
    for number in range(1, steps + 1):
        batch, at, coming = read(at)
        yield Due(batch, number == steps, coming)


@final
@dataclass(slots=True)
class WorkerShards:
    """A worker's shards of checkpoints, which its leader asks for while it waits.

    Attributes:
        rank: the worker.
        writer: writes the shards.
        meter: meter of the process.
        rests: whether the leader asks for them only while the worker waits for orders.
        taken: number of shards that the leader has taken.
    """

    rank: WorkerRank
    writer: ShardWriter
    meter: RankMeter
    rests: bool = True
    taken: int = 0

    def answer(self) -> None:
        """Answer the leader from now on, whenever the worker waits for frames."""
        handlers = {Kind.SAVE: self._save, Kind.SHARD: self._shard}
        messenger = self.rank.messenger
        messenger.mailbox.answer = HandlerTable(messenger.channel, handlers)

    def wait_until_taken(self) -> None:
        """Wait until the leader has taken the next shard."""
        messenger, count = self.rank.messenger, self.taken
        messenger.mailbox.wait_until(lambda: self.taken > count, messenger.patience_seconds)

    def _save(self, frame: Frame) -> Sequence[Outgoing]:
        self.meter.switch(Phase.CHECKPOINT)  # until the next order
        return [save_answer(self.writer, frame, self.rank.messenger.rank, self.rank.pieces())]

    def _shard(self, frame: Frame) -> Sequence[Outgoing]:
        if self.rests:
            self.meter.switch(Phase.CHECKPOINT)
        answer = shard_answer(self.writer, frame, self.rank.messenger.rank)
        self.taken += not self.writer.pending
        return [answer]


@final
@dataclass(slots=True, kw_only=True)
class LeaderLink(Link):
    """The link of a worker to the leader.

    Attributes:
        rank: the worker.
        mailbox: source of orders; the rank's, shared if there are threads.
        reads: reads the batches of an order to train.
        in_lockstep: whether all workers make the same steps.
        stop: stop request of signals.
        meter: meter of the process.
        shards: its shards of checkpoints.
        say: writes a line to the log.
        incarnation: how often this worker was started before in this attempt.
        has_left: whether it has left before the end of the run.
    """

    rank: WorkerRank
    mailbox: Mailbox | SharedMailbox
    reads: Callable[[Order], Iterator[Due]]
    in_lockstep: bool
    stop: StopRequest
    meter: RankMeter
    shards: WorkerShards
    say: Callable[[str], None]
    incarnation: int = 0
    has_left: bool = False
    _taken: int = 0

    @override
    def acts(self) -> Mapping[str, Act]:
        return {
            "lower": self._lower,
            "settle": self._settle,
            "evaluate": self._evaluate,
            "join": self._join,
            "leave": self._leave,
            "pass": self._pass,
            "end": self._end,
        }

    @override
    def read(self, order: Order) -> Iterator[Due]:
        return self.reads(order)

    @override
    def check(self, step: int, metrics: StepMetrics) -> None:
        if self.in_lockstep:  # else the leader knows the loss of a step, which several may share
            check_loss(step, metrics.loss_sum, self.rank.schedule)

    @override
    def take(self) -> Frame:
        # A rest may take long; the channel notices the loss of the leader.
        with self.meter.clock.waiting(Kind.DECISION.name.lower()):
            frame = self.mailbox.take(self._due(), IDLE_SECONDS)
        self._taken += 1
        return frame

    @override
    def take_now(self) -> Frame | None:
        frame = self.mailbox.take_now(self._due())
        self._taken += frame is not None
        return frame

    def _due(self) -> Receive:
        return Receive(Kind.DECISION, self.rank.leader, self._taken)

    @override
    def report(self, done: int, answer: Answer) -> None:
        rank = self.rank
        interval = rank.take_interval().plus(Interval(**asdict(answer.metrics)))
        report = {"interval": asdict(interval), "severity": self.stop.severity}
        if not self.in_lockstep:
            report |= {
                "learned": rank.step,
                "incarnation": self.incarnation,
                "writing": self.shards.writer.pending,
            }
        rank.messenger.send(rank.leader, Kind.REPORT, done, report)

    def _evaluate(self, order: Order) -> Answer:
        part, trainers = ScoredPart(order.values["part"]), order.values["trainers"]
        self.meter.switch(Phase.EVALUATE)
        # All stop at the same batch, and the leader's next order decides.
        with suppress(PreemptedError, InterruptedRunError):
            self.rank.evaluate(part, self.stop, trainers)
        return Answer()

    def _lower(self, order: Order) -> Answer:
        self.rank.lower(order.values["step"])
        return Answer()

    def _settle(self, order: Order) -> Answer:
        """At rest, fetch the servers' weights, and wait until all sent to tables has arrived."""
        runner, tables = self.rank.runner, self.rank.worker.tables
        runner.run(self._client.refresh(whole=False))
        if tables is not None:
            runner.run(tables.settle())
        return Answer()

    def _pass(self, order: Order) -> Answer:
        """Take part in a round without a batch."""
        self.rank.runner.run(self._client.skip())
        return Answer()

    def _join(self, order: Order) -> Answer:
        at = order.values["at"]
        self.rank.join(at)
        self.rank.runner.run(self._client.refresh(whole=True))
        self.say(f"{self._name} has been started again and goes on at batch {at}")
        return Answer()

    def _leave(self, order: Order) -> None:
        """Hand over the residual of weight gradients, where that is possible, and leave.

        In round-robin order others would wait for it as for a batch. Residuals of activations are
        lost: they would be added to those of later batches.
        """
        rank = self.rank
        if rank.worker.tables is not None:
            rank.runner.run(rank.worker.tables.flush())
            rank.runner.run(rank.worker.tables.settle())
        hands_over = order.values["hands_over"]
        rank.runner.run(self._client.flush() if hands_over else self._client.pull())
        self.has_left = True
        self.say(f"{self._name} leaves after SIGTERM to its trainer")

    def _end(self, order: Order) -> None:
        """End; raises PreemptedError or InterruptedRunError if the leader stops the run."""
        obey(order.values["severity"])

    @property
    def _client(self) -> ServerClient:
        client = self.rank.learner.client
        assert isinstance(client, ServerClient), "sync=async needs servers"
        return client

    @property
    def _name(self) -> str:
        return self.rank.topology.name(self.rank.messenger.rank)
