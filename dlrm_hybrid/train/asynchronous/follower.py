"""A follower: a worker that carries out the leader's orders, and waits for no other trainer.

it sends:      how many orders it has done, with metrics            REPORT
it receives:   orders to train on batches, to pass, to settle,      DECISION
               to evaluate, to leave after a signal to its trainer,
               to end; first, after a restart, to join at a batch
while waiting: copies what a checkpoint must hold, reports whether  SAVE, COPIED;
               that is written                                      SHARD

It receives the next batches before it is done with the last ones. Its threads, if it has several,
train on them at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, final

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.mailbox import Mailbox, Receive, SharedMailbox
from dlrm_hybrid.data.loader import Batch, LoaderState
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.server import IDLE_SECONDS, Handle
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import message, values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.asynchronous.crew import Crew
from dlrm_hybrid.train.engine import ignore
from dlrm_hybrid.train.saver import piece_groups
from dlrm_hybrid.train.server_rank import shard_answer
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import DlrmError, InterruptedRunError, PreemptedError, ScoredPart
from dlrm_hybrid.wire.frame import Frame, Kind

ReadPart = Callable[[LoaderState, int], Batch]
"""`Loader.part`."""
Order = Mapping[str, Any]


class _Due(NamedTuple):
    """A batch to train on, and whether it is the last of its order."""

    batch: Batch
    is_last: bool


@final
@dataclass(slots=True, kw_only=True)
class Follower:
    """A worker of a trainer that the leader keeps busy.

    Attributes:
        rank: the worker.
        mailbox: source of orders; the rank's, shared if there are threads.
        client: that of its weights.
        read: reads a trainer's rows of a batch.
        ahead: number of batches whose rows are prefetched from the tables.
        stop: stop request of signals.
        meter: that of the process.
        writer: writer of its shards of checkpoints.
        say: writes a line to the log.
        incarnation: how often this worker was started before in this attempt.
        has_left: whether it has left before the end of the run.
        crew: its threads; None if it has one.
    """

    rank: WorkerRank
    mailbox: Mailbox | SharedMailbox
    client: ServerClient
    read: ReadPart
    ahead: int
    stop: StopRequest
    meter: RankMeter
    writer: ShardWriter
    say: Callable[[str], None]
    incarnation: int = 0
    has_left: bool = False
    crew: Crew | None = None
    _reading: Iterator[_Due] = field(default_factory=lambda: iter(()))
    _ends: deque[bool] = field(default_factory=deque[bool])
    _metrics: StepMetrics = StepMetrics()
    _taken: int = 0
    _done: int = 0
    _held: Order | None = None

    def handlers(self) -> Mapping[Kind, Handle]:
        """Handlers for requests of the leader while it waits."""
        return {Kind.SAVE: self._save, Kind.SHARD: self._shard}

    def run(self) -> None:
        """Carry out orders until the end, or until it is to leave.

        Raises:
            PreemptedError, InterruptedRunError: the leader stops the run.
        """
        rank = self.rank
        self._report()
        while True:
            order = self._order()
            if order["do"] == "learn":
                self._learn(order)
                continue
            if order["do"] == "settle":
                self._settle()
            elif order["do"] == "evaluate":
                self._evaluate(ScoredPart(order["part"]), order["trainers"])
            elif order["do"] == "join":
                rank.join(order["at"])
                rank.runner.run(self.client.refresh(whole=True))
                name = rank.topology.name(rank.messenger.rank)
                self.say(f"{name} has been started again and goes on at batch {order['at']}")
            elif order["do"] == "leave":
                self._leave(order)
                return
            elif order["do"] == "pass":
                rank.runner.run(self.client.skip())
            elif order["do"] == "end":
                obey(order["severity"])
                return
            else:
                raise DlrmError(f"rank {rank.messenger.rank}: told to do {order['do']!r}")
            self._done += 1
            self._report()

    def _learn(self, order: Order) -> None:
        """Train on these batches, and on those of orders that arrive meanwhile.

        Rows are prefetched across the ends of orders as long as batches are there.
        """
        rank, window = self.rank, deque[Batch]()
        self._reading = self._read(order)
        if self.crew is not None:
            self.crew.learn(rank.step, self._next_batch, self._learned_by_thread)
            return
        while True:
            while len(window) <= self.ahead and (batch := self._next_batch()) is not None:
                window.append(batch)
            if not window:
                return
            batch = window.popleft()
            self._learned(rank.learn(batch, [*window]))

    def _next_batch(self) -> Batch | None:
        """Read the next batch of the orders that have arrived."""
        while (due := next(self._reading, None)) is None:
            come = self._next_lease()
            if come is None:
                return None
            self._reading = self._read(come)
        self._ends.append(due.is_last)
        return due.batch

    def _learned(self, metrics: StepMetrics) -> None:
        """Report if the order of the batch read first is done."""
        self.meter.step_done()
        self._metrics = self._metrics.plus(metrics)
        if self._ends.popleft():
            self._done += 1
            metrics, self._metrics = self._metrics, StepMetrics()
            self._report(metrics)

    def _learned_by_thread(self, metrics: StepMetrics) -> None:
        self.rank.step += 1
        self._learned(metrics)

    def _read(self, order: Order) -> Iterator[_Due]:
        batches = order["batches"]
        for number, (*at, part) in enumerate(batches, start=1):
            yield _Due(self.read(LoaderState(*at), part), is_last=number == len(batches))

    def _report(self, metrics: StepMetrics | None = None) -> None:
        report = {
            "learned": self.rank.step,
            "metrics": asdict(metrics or StepMetrics()),
            "interval": asdict(self.rank.since_last_met(self.rank.step, 0)),
            "severity": self.stop.severity,
            "incarnation": self.incarnation,
            "writing": self.writer.pending,
        }
        self.rank.messenger.send(self.rank.leader, Kind.REPORT, self._done, report)

    def _order(self) -> Order:
        """Wait for the next order."""
        order, self._held = self._held, None
        if order is None:
            # A rest may take long; the channel notices the loss of the leader.
            with self.meter.clock.waiting(Kind.DECISION.name.lower()):
                order = values_of(self.mailbox.take(self._due_order(), IDLE_SECONDS))
            self._taken += 1
        return order

    def _next_lease(self) -> Order | None:
        """The next order if it has arrived and is to train."""
        if self._held is None:
            frame = self.mailbox.take_now(self._due_order())
            if frame is None:
                return None
            self._held = values_of(frame)
            self._taken += 1
        return self._order() if self._held["do"] == "learn" else None

    def _due_order(self) -> Receive:
        return Receive(Kind.DECISION, self.rank.leader, self._taken)

    def _evaluate(self, part: ScoredPart, trainers: Sequence[int]) -> None:
        try:
            with self.meter.within(Phase.EVALUATE):
                self.rank.evaluate(part, self.stop, ignore, trainers)
        except (PreemptedError, InterruptedRunError):
            pass  # all have stopped at the same batch; the leader's next order decides

    def _settle(self) -> None:
        """At rest, fetch the servers' weights, and wait until all sent to tables has arrived."""
        runner, tables = self.rank.runner, self.rank.worker.tables
        runner.run(self.client.refresh(whole=False))
        if tables is not None:
            runner.run(tables.settle())

    def _leave(self, order: Order) -> None:
        """Hand over the residual of weight gradients, where that is possible, and leave.

        In round-robin order others would wait for it as for a batch. Residuals of activations are
        lost: they would be added to those of later batches.
        """
        rank = self.rank
        if rank.worker.tables is not None:
            rank.runner.run(rank.worker.tables.flush())
            rank.runner.run(rank.worker.tables.settle())
        rank.runner.run(self.client.flush() if order["hands_over"] else self.client.pull())
        self.has_left = True
        self.say(f"{rank.topology.name(rank.messenger.rank)} leaves after SIGTERM to its trainer")

    def _save(self, frame: Frame) -> Sequence[Outgoing]:
        with self.meter.within(Phase.CHECKPOINT):
            self.writer.begin(values_of(frame)["step"], piece_groups(self.rank.pieces()))
        messenger = self.rank.messenger
        answer = message(Kind.COPIED, messenger.rank, messenger.attempt, frame.number, {})
        return [Outgoing(frame.sender, answer, 0)]

    def _shard(self, frame: Frame) -> Sequence[Outgoing]:
        messenger = self.rank.messenger
        return [shard_answer(self.writer, frame, messenger.rank, messenger.attempt)]
