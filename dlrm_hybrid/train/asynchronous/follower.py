"""A worker that does what the leader says, and waits for no other trainer.

it asks:       what it has learned since it asked last          REPORT
it is told:    batches to learn, to settle, to evaluate, to end DECISION
               first, if it has been started again, where it goes on
while it waits it also copies what a checkpoint must hold, and says whether that is written
                                                                SAVE, COPIED; SHARD
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from dlrm_hybrid.checkpoint.writer import ShardWriter
from dlrm_hybrid.comm.mailbox import Receive
from dlrm_hybrid.data.loader import Batch, LoaderState, with_coming
from dlrm_hybrid.parallel.dense.client import ServerClient
from dlrm_hybrid.parallel.dense.server import IDLE_SECONDS, Handle
from dlrm_hybrid.parallel.effects import Outgoing
from dlrm_hybrid.parallel.messages import message, values_of
from dlrm_hybrid.parallel.step import StepMetrics
from dlrm_hybrid.telemetry.rank_meter import RankMeter
from dlrm_hybrid.telemetry.traffic import Phase
from dlrm_hybrid.train.saver import piece_groups
from dlrm_hybrid.train.server_rank import shard_answer
from dlrm_hybrid.train.signals import StopRequest, obey
from dlrm_hybrid.train.worker_rank import WorkerRank
from dlrm_hybrid.types import DlrmError, InterruptedRunError, PreemptedError
from dlrm_hybrid.wire.frame import Frame, Kind

ReadPart = Callable[[LoaderState, int], Batch]
"""`Loader.part`."""


@final
@dataclass(slots=True, kw_only=True)
class Follower:
    """One worker of a trainer that the leader keeps busy.

    Attributes:
        rank: the worker.
        client: of its weights.
        read: the rows of a batch.
        ahead: batches whose rows its tables ask for before they are due.
        stop: stop request of signals.
        meter: of the process.
        writer: of its part of checkpoints.
        say: writes a line to the log.
        show: called now and then during an evaluation with the rows done.
        incarnation: how often this worker had been started before in this attempt.
    """

    rank: WorkerRank
    client: ServerClient
    read: ReadPart
    ahead: int
    stop: StopRequest
    meter: RankMeter
    writer: ShardWriter
    show: Callable[[int], None]
    say: Callable[[str], None]
    incarnation: int = 0

    def handlers(self) -> Mapping[Kind, Handle]:
        """What it does beside, whenever it waits."""
        return {Kind.SAVE: self._save, Kind.SHARD: self._shard}

    def run(self) -> None:
        """Follow to the end.

        Raises:
            PreemptedError, InterruptedRunError: the leader says that the run is to stop.
        """
        rank, asked = self.rank, 0
        metrics = StepMetrics()
        while True:
            order = self._ask(asked, metrics)
            metrics = StepMetrics()
            asked += 1
            if order["do"] == "learn":
                batches = (self.read(LoaderState(*at), part) for *at, part in order["batches"])
                for batch, coming in with_coming(batches, self.ahead):
                    metrics = metrics.plus(rank.learn(rank.step, batch, coming))
                    self.meter.step_done()
            elif order["do"] == "settle":
                self._settle()
            elif order["do"] == "evaluate":
                self._evaluate(order["trainers"])
            elif order["do"] == "join":
                rank.join(order["at"])
                rank.runner.run(self.client.refresh(whole=True))
                name = rank.topology.name(rank.messenger.rank)
                self.say(f"{name} has been started again and goes on at batch {order['at']}")
            elif order["do"] == "end":
                obey(order["severity"])
                return
            else:
                raise DlrmError(f"rank {rank.messenger.rank}: told to do {order['do']!r}")

    def _ask(self, number: int, metrics: StepMetrics) -> Mapping[str, Any]:
        report = {
            "learned": self.rank.step,
            "metrics": asdict(metrics),
            "interval": asdict(self.rank.since_last_met(self.rank.step, 0)),
            "severity": self.stop.severity,
            "incarnation": self.incarnation,
        }
        messenger, leader = self.rank.messenger, self.rank.leader
        messenger.send(leader, Kind.REPORT, number, report)
        # However long a rest takes: the channel notices when the leader is gone.
        frame = messenger.mailbox.take(Receive(Kind.DECISION, leader, number), IDLE_SECONDS)
        return values_of(frame)

    def _evaluate(self, trainers: Sequence[int]) -> None:
        try:
            with self.meter.within(Phase.EVALUATE):
                self.rank.evaluate(self.stop, self.show, trainers)
        except (PreemptedError, InterruptedRunError):
            pass  # all have stopped at the same batch; the leader says what comes now

    def _settle(self) -> None:
        """At rest: weights become those of the servers, and what was sent to tables has arrived."""
        runner, tables = self.rank.runner, self.rank.worker.tables
        runner.run(self.client.refresh(whole=False))
        if tables is not None:
            runner.run(tables.settle())

    def _save(self, frame: Frame) -> Sequence[Outgoing]:
        with self.meter.within(Phase.CHECKPOINT):
            self.writer.begin(values_of(frame)["step"], piece_groups(self.rank.pieces()))
        messenger = self.rank.messenger
        answer = message(Kind.COPIED, messenger.rank, messenger.attempt, frame.number, {})
        return [Outgoing(frame.sender, answer, 0)]

    def _shard(self, frame: Frame) -> Sequence[Outgoing]:
        messenger = self.rank.messenger
        return [shard_answer(self.writer, frame, messenger.rank, messenger.attempt)]
