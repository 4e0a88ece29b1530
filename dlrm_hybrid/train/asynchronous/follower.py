"""A worker that does what the leader says, and waits for no other trainer.

it says:       how many orders it has done, and what it has learned REPORT
it is told:    batches to learn, to pass, to settle, to evaluate,   DECISION
               to leave after a signal to its trainer, to end
               first, if it has been started again, where it goes on
while it waits it also copies what a checkpoint must hold, and says whether that is written
                                                                    SAVE, COPIED; SHARD

It is told which batches come next before it has learned from the last ones. Its threads, if it has
several, learn from them at the same time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple, final

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.mailbox import Mailbox, Receive
from dlrm_hybrid.comm.shared_mailbox import SharedMailbox
from dlrm_hybrid.data.loader import Batch, LoaderState
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.server import IDLE_SECONDS, Handle
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import message, values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.asynchronous.crew import Crew
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
    """A batch to learn from, and whether its order is done then."""

    batch: Batch
    is_last: bool


@final
@dataclass(slots=True, kw_only=True)
class Follower:
    """One worker of a trainer that the leader keeps busy.

    Attributes:
        rank: the worker.
        mailbox: of orders; that of the rank, shared where there is a crew.
        client: of its weights.
        read: the rows of a batch.
        ahead: batches whose rows its tables ask for before they are due.
        stop: stop request of signals.
        meter: of the process.
        writer: of its part of checkpoints.
        say: writes a line to the log.
        show: called now and then during an evaluation with the rows done.
        incarnation: how often this worker had been started before in this attempt.
        has_left: it goes before the run ends.
        crew: its threads; None where it has one.
    """

    rank: WorkerRank
    mailbox: Mailbox | SharedMailbox
    client: ServerClient
    read: ReadPart
    ahead: int
    stop: StopRequest
    meter: RankMeter
    writer: ShardWriter
    show: Callable[[int], None]
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
        """What it does beside, whenever it waits."""
        return {Kind.SAVE: self._save, Kind.SHARD: self._shard}

    def run(self) -> None:
        """Follow to the end, or until it is to leave.

        Raises:
            PreemptedError, InterruptedRunError: the leader says that the run is to stop.
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
        """Learn from these batches, and from those of the orders that have come by then.

        As long as there are any, their rows are asked for ahead across the ends of orders.
        """
        rank, window = self.rank, deque[Batch]()
        self._reading = self._read(order)
        if self.crew is not None:
            self.crew.learn(rank.step, self._next_batch, self._learned)
            return
        while True:
            while len(window) <= self.ahead and (batch := self._next_batch()) is not None:
                window.append(batch)
            if not window:
                return
            batch = window.popleft()
            self._learned(rank.learn(rank.step, batch, [*window]))

    def _next_batch(self) -> Batch | None:
        """The next one of the orders that have come."""
        while (due := next(self._reading, None)) is None:
            come = self._next_lease()
            if come is None:
                return None
            self._reading = self._read(come)
        self._ends.append(due.is_last)
        return due.batch

    def _learned(self, metrics: StepMetrics) -> None:
        """Count a batch, the next one that was read; say so where its order is done."""
        self.rank.step += 1
        self.meter.step_done()
        self._metrics = self._metrics.plus(metrics)
        if self._ends.popleft():
            self._done += 1
            metrics, self._metrics = self._metrics, StepMetrics()
            self._report(metrics)

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
        """The next order, which is waited for."""
        order, self._held = self._held, None
        if order is None:
            # However long a rest takes: the channel notices when the leader is gone.
            with self.meter.clock.waiting(Kind.DECISION.name.lower()):
                order = values_of(self.mailbox.take(self._due_order(), IDLE_SECONDS))
            self._taken += 1
        return order

    def _next_lease(self) -> Order | None:
        """The next order if it is to learn and has come."""
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
                self.rank.evaluate(part, self.stop, self.show, trainers)
        except (PreemptedError, InterruptedRunError):
            pass  # all have stopped at the same batch; the leader says what comes now

    def _settle(self) -> None:
        """At rest: weights become those of the servers, and what was sent to tables has arrived."""
        runner, tables = self.rank.runner, self.rank.worker.tables
        runner.run(self.client.refresh(whole=False))
        if tables is not None:
            runner.run(tables.settle())

    def _leave(self, order: Order) -> None:
        """Hand over what compression has held back of the weights' gradients, where that can be.

        In turns others would have to wait for it as for a batch. What is held back of activations
        goes: it would be added to those of later batches.
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
